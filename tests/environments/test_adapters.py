"""Adapters with the real libraries: rows, episodes, rewards and errors."""

import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.environment.lookup import locate
from paceline.errors import ConfigError, RolloutError
from paceline.types import End
from tests.episodes import Model, tokens

ECHO = "verifiers:echo-environment"


@pytest.fixture(autouse=True)
def packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "packages"))


def test_verifiers_dataset_is_data() -> None:
    located = locate(ECHO, {"words": ["cat", "dog"]})
    train, held_out = located.rows(held_out=False), located.rows(held_out=True)
    assert train is not None and held_out is not None
    assert [row["answer"] for row in train(0)] == ["cat", "dog"]
    assert [row["answer"] for row in held_out(0)] == ["bee"]
    assert next(iter(train(0)))["prompt"][-1]["content"] == "Spell cat."


def test_verifiers_conversation_has_exact_tokens_and_its_reward() -> None:
    row = {"prompt": [{"role": "user", "content": "Spell cat."}], "answer": "cat"}
    model = Model("c o d", "cat")
    trajectory = model.play(ECHO, row)
    assert [turn.reward for turn in trajectory.turns] == [0.0, 1.0]
    assert tokens(trajectory) == model.contexts[-1]
    assert model.contexts[1][: len(model.contexts[0])] == model.contexts[0]
    assert model.seen[1].endswith(
        "c o d<|im_end|>\n<|im_start|>user\nYou said c o d.<|im_end|>\n<|im_start|>assistant\n"
    )
    assert trajectory.text == "cat"


def test_verifiers_tool_is_called() -> None:
    row = {"prompt": [{"role": "user", "content": "Spell cat."}], "answer": "cat"}
    call = '<tool_call>\n{"name": "twice", "arguments": {"word": "ca"}}\n</tool_call>'
    model = Model(call, "cat")
    trajectory = model.play(ECHO, row, {"tool": True})
    assert '"name": "twice"' in model.seen[0], "the model does not see the tool"
    assert "<tool_response>\ncaca\n</tool_response>" in model.seen[1]
    assert trajectory.total_reward == 1.0 and tokens(trajectory) == model.contexts[-1]


def test_verifiers_episode_ends_when_context_is_full() -> None:
    row = {"prompt": [{"role": "user", "content": "Spell cat."}], "answer": "cat"}
    model = Model("c" * 60)
    trajectory = model.play(ECHO, row, max_length=90)
    assert len(trajectory.turns) == 1 and trajectory.total_reward == pytest.approx(1 / 3)


def test_verifiers_environment_that_changes_history_fails_the_trajectory() -> None:
    row = {"prompt": [{"role": "user", "content": "Spell cat."}], "answer": "cat"}
    with pytest.raises(RolloutError, match="changes earlier messages"):
        Model("c", "cat").play(ECHO, row, {"forgets": True})


def test_verifiers_environment_that_is_missing_is_reported() -> None:
    with pytest.raises(ConfigError, match=r"verifiers:nothing-here': No module named"):
        Model().play("verifiers:nothing-here", {})
    with pytest.raises(ConfigError, match="unexpected keyword argument 'wrods'"):
        Model().play(ECHO, {}, {"wrods": []})


def test_verifiers_needs_chat_template() -> None:
    model = Model()
    model.tokenizer.chat_template = None
    with pytest.raises(ConfigError, match="has no chat template"):
        model.play(ECHO, {})


def test_reasoning_gym_task_scores_its_questions() -> None:
    rows = locate("reasoning-gym:leg_counting", {"size": 5}).rows(held_out=False)
    assert rows is not None
    first, again, other = list(rows(1)), list(rows(1)), list(rows(2))
    assert first == again and first != other and len(first) == 5
    answer = first[0]["entry"]["answer"]
    for text, reward in ((answer, 1.0), (f"So: <answer>{answer}</answer>", 1.0), ("no", 0.0)):
        trajectory = Model(text).play("reasoning-gym:leg_counting", first[0], {"size": 5})
        assert trajectory.total_reward == reward and trajectory.end is End.DONE


def test_reasoning_gym_mistake_is_reported() -> None:
    with pytest.raises(ConfigError, match="unknown task; did you mean 'leg_counting'"):
        locate("reasoning-gym:leg_count").rows(held_out=False)(0)  # type: ignore[misc]
    with pytest.raises(ConfigError, match="unexpected keyword argument 'legs'"):
        locate("reasoning-gym:leg_counting", {"legs": 3}).rows(held_out=False)(0)  # type: ignore[misc]


LAKE = {"is_slippery": False, "instructions": "Walk.", "actions": ["left", "down", "right", "up"]}


def test_gymnasium_actions_have_names() -> None:
    rows = locate("gymnasium:FrozenLake-v1", LAKE).rows(held_out=False)
    assert rows is not None
    row = next(iter(rows(0)))
    path = ["I go down", "down", "swim", "right", "right", "down"]
    model = Model(*path)
    trajectory = model.play("gymnasium:FrozenLake-v1", row, LAKE)
    assert "user\nWalk.\n0<|im_end|>" in model.seen[0]
    assert "This is not an action. Write one of left, down, right, up." in model.seen[3]
    assert trajectory.end is End.TURNS and trajectory.total_reward == 0.0
    trajectory = Model("down", "down", "right", "right", "down", "right").play(
        "gymnasium:FrozenLake-v1", row, LAKE
    )
    assert trajectory.end is End.DONE and trajectory.total_reward == 1.0


def test_gymnasium_text_space_and_mapping(tmp_path: Path) -> None:
    file = tmp_path / "words.py"
    file.write_text(TEXT_ENVIRONMENT)
    sys.path.insert(0, str(tmp_path))
    try:
        rows = locate("gymnasium:words:Words-v0").rows(held_out=False)
        assert rows is not None
        row = next(iter(rows(0)))
        trajectory = Model("abc").play("gymnasium:words:Words-v0", row)
        assert trajectory.end is End.DONE and trajectory.total_reward == 3.0
        mapped = {"observe": f"{file}:shout", "act": f"{file}:first"}
        model = Model("abc")
        assert model.play("gymnasium:words:Words-v0", row, mapped).total_reward == 1.0
        assert "SAY A WORD" in model.seen[0]
    finally:
        sys.path.remove(str(tmp_path))


TEXT_ENVIRONMENT = """
import gymnasium as gym

class Words(gym.Env):
    observation_space = gym.spaces.Text(40, charset="abcdefghijklmnopqrstuvwxyz ")
    action_space = gym.spaces.Text(10)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return "say a word", {}

    def step(self, action):
        return "good", float(len(action)), True, False, {}

def shout(observation):
    return observation.upper()

def first(text):
    return text[:1]

gym.register("Words-v0", entry_point=Words)
"""


def test_gymnasium_environment_without_text_is_rejected() -> None:
    with pytest.raises(ConfigError, match="doesn't exist"):
        locate("gymnasium:Nothing-v1").rows(held_out=False)(0)  # type: ignore[misc]
    with pytest.raises(ConfigError, match=r"its actions are Box.*set environment_args\.act"):
        locate("gymnasium:Pendulum-v1").rows(held_out=False)(0)  # type: ignore[misc]


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """Serve an environment of OpenEnv: the model has to say a word."""
    import uvicorn
    from openenv.core.env_server import create_fastapi_app
    from openenv.core.env_server.interfaces import Environment
    from openenv.core.env_server.types import Action, Observation, State

    class Say(Action):  # type: ignore[misc]
        message: str

    class Heard(Observation):  # type: ignore[misc]
        text: str = ""

    class Words(Environment):  # type: ignore[misc]
        SUPPORTS_CONCURRENT_SESSIONS = True

        def reset(self, seed=None, episode_id=None, **given):  # type: ignore[no-untyped-def]
            self.word = "cat" if seed == 7 else "dog"
            return Heard(text=f"Say {self.word}.", done=False, reward=0.0)

        def step(self, action, **given):  # type: ignore[no-untyped-def]
            right = action.message == self.word
            return Heard(text="Again.", done=right, reward=float(right))

        @property
        def state(self) -> State:
            return State()

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    app = create_fastapi_app(Words, Say, Heard, max_concurrent_envs=8)
    running = uvicorn.Server(uvicorn.Config(app, port=port, log_level="error"))
    thread = threading.Thread(target=running.run, daemon=True)
    thread.start()
    deadline = time.monotonic() + 60
    while not running.started and time.monotonic() < deadline:
        time.sleep(0.05)
    assert running.started, "the server did not start"
    yield f"http://127.0.0.1:{port}"
    running.should_exit = True
    thread.join(30)


def test_openenv_server_answers_the_model(server: str) -> None:
    arguments = {"observation_key": "text", "instructions": "Listen."}
    model = Model("dog", "cat")
    trajectory = model.play(f"openenv:{server}", {"seed": 7}, arguments)
    assert "Listen.\nSay cat." in model.seen[0] and "Again." in model.seen[1]
    assert [turn.reward for turn in trajectory.turns] == [0.0, 1.0]
    assert trajectory.end is End.DONE


def test_openenv_server_that_is_not_there_fails_the_trajectory() -> None:
    with pytest.raises(RolloutError, match=r"openenv:http://127\.0\.0\.1:1.*reset\(\) raised"):
        Model("x").play("openenv:http://127.0.0.1:1", {"seed": 1})


def test_names_are_known_to_early_checks() -> None:
    from paceline.environment.lookup import check_name

    for name in (ECHO, "reasoning-gym:x", "gymnasium:x", "openenv:x"):
        check_name(name)
