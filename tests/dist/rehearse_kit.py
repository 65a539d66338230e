"""What the test of rehearsals and the process that it starts both know."""

from __future__ import annotations

from loongd.wire import Start

NUM_INSTANCES = 2
KERNELS = {
    "draw_filtered",  # sampling
    "attend_shares",  # prefill alone
    "merge_rows",  # prefill together
    "product_of_few",  # decode
    "push_block",  # decode together
}
"""Some of what a start launches on two instances, one of each kind of step."""


def start_message() -> Start:
    """Worker 1 of a group on GPUs."""
    return Start(
        rank=1,
        world_size=NUM_INSTANCES,
        epoch=0,
        rendezvous="",
        model_dir="",
        load_format="dummy",
        dtype="bfloat16",
        device="cuda",
        cores=[],
        kv_pool_tokens=None,
        gpu_memory_utilization=0.9,
        max_step_tokens=8192,
        seed=0,
    )
