"""On a GPU, steps queued behind one another draw what the eager way draws one step at a time.

Graphs leave each token on the device, where the next step reads it before the host has seen it.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator

import pytest
import torch

from loongd.wire import Extend, RunStep, Sampled, Sampling, Start, pack_tokens
from loongd.worker.flight import Flight
from loongd.worker.heart import Pulse
from loongd.worker.runner import Runner

pytestmark = pytest.mark.gpu
DEVICE = "cuda"
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 6000,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "torch_dtype": "float32",
}
WAYS = {
    "plain": Sampling(),
    "hot": Sampling(temperature=1.0, seed=1),
    "cut": Sampling(temperature=0.8, top_k=50, top_p=0.95, seed=2),
    "wide": Sampling(temperature=1.0, top_p=0.9, seed=3, num_logprobs=2),
    "floor": Sampling(temperature=1.0, min_p=0.5, seed=4, num_logprobs=0),
    "banned": Sampling(temperature=1.0, seed=5, banned=[7, 8], bias=[(9, 2.0)]),
}
NUM_STEPS = 20
IN_FLIGHT = 3


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Runner:
    path = tmp_path_factory.mktemp("dummy-llama")
    (path / "config.json").write_text(json.dumps(CONFIG))
    start = Start(
        rank=0,
        world_size=1,
        epoch=1,
        rendezvous=str(path / "rendezvous"),
        model_dir=str(path),
        load_format="dummy",
        dtype="float32",
        device=DEVICE,
        cores=[],
        kv_pool_tokens=2000,
        gpu_memory_utilization=0.5,
        max_step_tokens=512,
        seed=0,
    )
    return Runner.start(start, lambda *_: None, Pulse())


def step(step_id: int, names: list[str], before: list[Sampled], follows: int = 0) -> RunStep:
    """Step 1 is the prefill of all; request i then has segments 2 i (prompt) and 2 i + 1."""
    batch = []
    for number, name in enumerate(names):
        prompt = [(37 * number + 7 * i) % 6000 for i in range(20 + 3 * number)]
        decode = step_id > 1
        grown = [2 * number + 1] if step_id > 2 else []
        newest = [] if follows else [before[number].token] if decode else prompt
        batch.append(
            Extend(
                request_id=name,
                tokens=pack_tokens(newest),
                start=len(prompt) + step_id - 2 if decode else 0,
                master=0 if decode else None,
                segment=2 * number + decode,
                keep=[] if decode else [(0, len(prompt))],
                cached=[2 * number, *grown] if decode else [],
                holders=[0] if decode else [],
                sampling=WAYS[name],
            )
        )
    return RunStep(step_id=step_id, epoch=1, members=[0], batch=batch, follows=follows)


def one_by_one(runner: Runner, names: list[str]) -> Iterator[list[Sampled]]:
    drawn: list[Sampled] = []
    for step_id in range(1, NUM_STEPS):
        drawn = runner.run(step(step_id, names, drawn))
        yield drawn


def queued(runner: Runner, names: list[str]) -> Iterator[list[Sampled]]:
    first = runner.run(step(1, names, []))
    yield first
    flights: deque[Flight] = deque()
    for step_id in range(2, NUM_STEPS):
        follows = step_id - 1 if step_id > 2 else 0
        flights.append(runner.launch(step(step_id, names, first, follows)))
        if len(flights) == IN_FLIGHT:
            yield flights.popleft().wait()
    for flight in flights:
        yield flight.wait()


@pytest.mark.parametrize("names", [["hot"], ["plain", "wide"], [*WAYS]], ids=str)
def test_queued_steps_draw_the_same(runner: Runner, names: list[str]) -> None:
    graphs, prefills = runner._decoder, runner._prefiller
    runner._decoder = runner._prefiller = None
    expected = list(one_by_one(runner, names))
    runner.keep([])
    runner._decoder, runner._prefiller = graphs, prefills
    found = list(queued(runner, names))
    runner.keep([])
    for ours, theirs in zip(found, expected, strict=True):
        assert [s.token for s in ours] == [s.token for s in theirs]
        for one, other in zip(ours, theirs, strict=True):
            assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
            assert one.top_ids == other.top_ids
    tokens = [s.token for drawn in expected for s in drawn]
    assert len(set(tokens)) > NUM_STEPS / 2
    assert (graphs is not None) == torch.cuda.is_available()
