"""Links, anchors and measurements in the documents."""

import re

from tests.docs.documents import ROOT, documents, links_of, parts_of, sections_of

DATE = re.compile(r"\d{4}-\d{2}-\d{2}")
# What only a measurement tells: a rate, a duration, a comparison, or a machine.
MEASURED = re.compile(
    r"\d (?:tokens|samples|steps)/s|(?<!least )(?<!less than )\b\d+ ?% (?:faster|slower)"
    r"|\btakes? (?:about )?[\d.]+ m?s\b|(?:reward|KL) (?:rises|falls) from"
    r"|on (?:two|2) (?:CPU )?cores"
    r"|^\|.*(?:tokens/s|steps/s|speedup|time on|\bms\b|, s\b).*\|$"
)
# How it is repeated: a command, a test, or results that name their command.
REPEATED = re.compile(r"\b(?:python|paceline|make)\s[\w/]|\./run_|tests/\w+/|results/[\w.]+")


def test_link_leads_to_existing_file_and_section() -> None:
    broken = []
    for page in documents():
        for path, anchor in links_of(page):
            target = page.parent / path if path else page
            where = f"{page.relative_to(ROOT)}: {path}#{anchor}".removesuffix("#")
            if not target.exists():
                broken.append(f"{where}: no such file")
            elif anchor and target.suffix == ".md" and anchor not in sections_of(target):
                near = ", ".join(sections_of(target))
                broken.append(f"{where}: no such section; there are: {near}")
    assert not broken, "\n".join(broken)


def test_measurement_in_section_has_command_and_date() -> None:
    """A page may give one date for all its values: "on this page were measured ... on DATE"."""
    problems = []
    for page in documents():
        if page.name == "CHANGELOG.md" or "on this page were measured" in page.read_text():
            continue
        for line, text in parts_of(page):
            found = next(filter(None, map(MEASURED.search, text.splitlines())), None)
            if found and not (DATE.search(text) and REPEATED.search(text)):
                problems.append(f"{page.relative_to(ROOT)}:{line}: {found[0]}")
    assert not problems, "no date or no command:\n" + "\n".join(problems)


def test_measurement_in_readme_has_command_and_date() -> None:
    """Every table with a column "Result" says how and when its values were measured."""
    lines = (ROOT / "README.md").read_text().splitlines()
    headers = [at for at, line in enumerate(lines) if re.match(r"\|.*\| Result \|", line)]
    assert headers
    for header in headers:
        names = [name.strip() for name in lines[header].strip("|").split("|")]
        for line in lines[header + 2 :]:
            if not line.startswith("|"):
                break
            row = dict(zip(names, line.strip("|").split("|"), strict=True))
            assert DATE.fullmatch(row["Date"].strip()), f"no date: {line}"
            command = re.search(r"`python ([\w/.]+)", row["Command"])
            assert command and (ROOT / command[1]).exists(), f"no such command: {line}"
