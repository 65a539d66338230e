"""Steps that pause between layers: what they hold, and what becomes of those that never go on.

That results are the same whatever runs in between is proved in `test_plans`.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from cluster_kit import Cluster, Sequence

from loongd.errors import PlanError
from loongd.wire import Extend, RunStep, Sampling, pack_tokens

PROMPT = [37 * i % 199 for i in range(20)]


def prefill(members: list[int], until_layer: int, segment: int = 7) -> RunStep:
    """A prefill of `PROMPT` that pauses, kept by the first member."""
    extend = Extend(
        request_id="r",
        tokens=pack_tokens(PROMPT),
        start=0,
        master=None,
        segment=segment,
        keep=[(members[0], len(PROMPT))],
        cached=[],
        holders=[],
        sampling=Sampling(),
    )
    return RunStep(1, 1, members, [extend], until_layer=until_layer)


def begin(cluster: Cluster, members: list[int], until_layer: int = 1) -> RunStep:
    """Run it up to its pause."""
    step = prefill(members, until_layer)
    assert cluster._all(members, step) == [[]] * len(members)
    return step


def rest(step: RunStep, step_id: int = 2) -> RunStep:
    return RunStep(step_id, 1, step.members, [], resumes=step.step_id)


def test_slots_are_taken_when_a_step_begins_and_the_token_is_drawn_at_its_end(
    llama_dir: Path,
) -> None:
    cluster = Cluster(llama_dir, 2)
    step = begin(cluster, [0, 1], until_layer=2)
    assert [pool.num_used for pool in cluster.pools] == [20, 0]
    drawn = [one for part in cluster._all([0, 1], rest(step)) for one in part]
    other = Sequence("r", PROMPT)
    assert drawn[0].token == cluster.extend([0], [(other, 20, 0, [])])["r"].token
    assert [len(runner._paused) for runner in cluster.runners] == [0, 0]


@pytest.mark.parametrize("how", ["free", "keep"])
def test_a_step_whose_segment_is_gone_is_given_up(how: str, llama_dir: Path) -> None:
    cluster = Cluster(llama_dir, 2)
    begin(cluster, [0, 1])
    for runner in cluster.runners:
        runner.free([8])
        runner.keep([7, 9])
        assert len(runner._paused) == 1, "that concerns others"
        runner.free([7]) if how == "free" else runner.keep([8])
        assert len(runner._paused) == 0
    cluster.check()


def test_what_is_not_paused_cannot_go_on(llama_dir: Path) -> None:
    cluster = Cluster(llama_dir, 1)
    step = begin(cluster, [0])
    runner = cluster.runners[0]
    runner.free([7])
    with pytest.raises(PlanError, match="step 2 resumes step 1, which is not paused here"):
        runner.run(rest(step))
    cluster.check()


@pytest.mark.parametrize("until_layer", [3, 40])
def test_a_step_cannot_pause_behind_the_last_layer(until_layer: int, llama_dir: Path) -> None:
    """The model has three."""
    cluster = Cluster(llama_dir, 1)
    with pytest.raises(PlanError, match=f"no layer {until_layer} is ahead to pause before"):
        cluster.runners[0].run(prefill([0], until_layer))
    cluster.check()


def test_a_rest_that_pauses_where_the_step_has_been_gives_its_slots_back(llama_dir: Path) -> None:
    cluster = Cluster(llama_dir, 1)
    step = begin(cluster, [0], until_layer=2)
    runner = cluster.runners[0]
    with pytest.raises(PlanError, match="no layer 1 is ahead"):
        runner.run(RunStep(2, 1, [0], [], until_layer=1, resumes=step.step_id))
    assert len(runner._paused) == 0
    cluster.check()
