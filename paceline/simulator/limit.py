"""Speed of light of a scenario: its steps per second if nothing waited and engines were full.

It is what the device-time ledger of a run calls the limit, computed from the costs.
"""

from paceline.simulator.simulation import Scenario


def limit_steps_per_s(scenario: Scenario) -> float:
    """Return the steps per second of full engines and a trainer that never wait."""
    costs, rows = scenario.costs, scenario.groups_per_step * scenario.group_size
    prefill_s = costs.prefill_token_s * scenario.groups_per_step * scenario.prompt_tokens
    made = scenario.groups_per_step * scenario.generated * costs.turns
    started_s = costs.prefill_sequence_s * made
    generate_s = (made * _completion_s(scenario) + prefill_s + started_s) / scenario.engines
    lengths, prompt = scenario.lengths, scenario.prompt_tokens  # a row has one turn or several
    tokens = scenario.groups_per_step * prompt + rows * costs.turns * lengths.mean
    squares = 2 * prompt * costs.turns * lengths.mean + costs.turns * (
        lengths.mean_square + (costs.turns - 1) * lengths.mean**2
    )
    context = (scenario.groups_per_step * prompt**2 + rows * squares) / 2
    train_s = costs.train_s(tokens, scenario.train_devices, context=context)
    if scenario.has_critic:
        devices = scenario.critic_devices or scenario.train_devices
        critic_s = costs.train_s(tokens, devices, costs.critic_factor, context)
        train_s = max(train_s, critic_s) if scenario.critic_devices else train_s + critic_s
    if scenario.shared:
        step_s = generate_s + train_s
        if scenario.overlap:  # seconds in which both work, each at its lower speed
            both = min(costs.overlap_decode * generate_s, costs.overlap_train * train_s)
            gained = both / costs.overlap_decode + both / costs.overlap_train - both
            step_s -= max(0.0, gained)
    else:
        step_s = max(generate_s, train_s)
    return 1 / step_s if step_s > 0 else float("inf")


def _completion_s(scenario: Scenario) -> float:
    """Return the seconds of an engine per completion, if it always has the best number of them:
    that of its slots, unless it was measured to be faster with fewer."""
    costs, lengths, slots = scenario.costs, scenario.lengths, scenario.slots
    # A token has the ones before it in the KV cache: on average, half of a completion weighted by
    # its length.
    context = scenario.prompt_tokens + lengths.mean_square / lengths.mean / 2
    counts = {slots, *(count for count, _ in costs.decode_points if 0 < count < slots)}
    return lengths.mean * min(costs.burst_s(1, n, round(n * context)) / n for n in counts)
