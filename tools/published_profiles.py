#!/usr/bin/env python3
"""Write the profiles of etc/profiles/ that come from published or earlier measurements.

    tools/published_profiles.py [DIRECTORY]

A800: LoongServe's own times (SOSP 2024, artifact): figure 3 in absolute milliseconds, figure 2 as
ratios between tensor-parallel degrees, figure 14 as ratios between numbers of masters.
H200: vLLM 0.26 on one and two GPUs, and microbenchmarks of the links, until `loongctl profile` has
run there: a file that was measured is left alone. Each file's `source` says what is measured and
what is derived.
"""

from __future__ import annotations

import sys
from pathlib import Path

from loongd.profiling.store import load
from loongd.sched.sib_default import HARDWARE, ModelFacts, compute_bound_batch
from loongd.sched.sib_fit import DecodePoint, PrefillPoint, fit_decode, fit_prefill
from loongd.sched.sib_profile import (
    DecodeCoefficients,
    DecodeFit,
    MigrateFit,
    PrefillFit,
    Profile,
    dump_profile,
)

LLAMA2 = ModelFacts(
    name="llama-2-7b",
    num_layers=32,
    hidden_size=4096,
    num_heads=32,
    num_kv_heads=32,
    head_dim=128,
    intermediate_size=11008,
    vocab_size=32000,
)
LLAMA3 = ModelFacts(
    name="llama-3.1-8b",
    num_layers=32,
    hidden_size=4096,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    intermediate_size=14336,
    vocab_size=128256,
)

# (batch, length): prefill ms, decode ms; LoongServe figure 3.
FIGURE_3 = {
    "tp8": [
        (512, 1000, 7757.4, 38.87),
        (128, 5000, 10157.0, 37.76),
        (64, 10000, 10791.9, 36.38),
        (16, 50000, 19506.5, 42.93),
        (4, 100000, 13546.3, 26.36),
        (1, 500000, 51135.5, 37.58),
    ],
    "tp4 x 2": [
        (512, 1000, 5775.6, 42.55),
        (128, 5000, 7694.3, 40.34),
        (64, 10000, 8306.2, 38.15),
        (16, 50000, 16595.0, 44.92),
        (4, 100000, 12147.0, 28.03),
        (1, 500000, 51699.9, 41.61),
    ],
    "tp2 x 4": [
        (512, 1000, 5267.1, 42.25),
        (128, 5000, 7071.8, 41.37),
        (64, 10000, 7701.1, 40.14),
        (16, 50000, 15744.4, 45.89),
        (4, 100000, 11798.4, 28.91),
        (1, 500000, 53605.9, 37.79),
    ],
}
TP1_1K_MS = 68.89
TP1_10_MS = 18.58
# Figure 2: time relative to tp 1 at batch 1.
PREFILL_1K = {1: 1.0, 2: 0.695, 4: 0.532, 8: 0.465}
PREFILL_100K = {1: 1.0, 2: 0.522, 4: 0.287, 8: 0.167}
DECODE_100 = {1: 1.0, 2: 0.9, 4: 0.948, 8: 0.847}
DECODE_TP1_10_MS = 11.38

A800_SOURCE = (
    "Stands in until loongctl profile has run on A800. LoongServe's published times on eight "
    "A800-80GB, not measured with loongd. Published: prefill and decode of eight GPUs (figure 3: "
    "tp 8, tp 4 x 2, tp 2 x 4), batch 1 of 10 and 1,000 tokens at tp 1. Derived: one "
    "instance of tp 1, 2, 4 from figure 2's ratios, masters from figure 14's, tp 1 x 8 from a "
    "digitised plot, per-request decode cost of tp 1; other degrees by interpolation. Migration "
    "from 150 GB/s per GPU, not measured."
)


def point(batch: int, length: int, ms: float) -> PrefillPoint:
    return PrefillPoint(((0, length),) * batch, ms / 1e3)


def tp8_prefill() -> PrefillFit:
    points = [point(batch, length, ms) for batch, length, ms, _ in FIGURE_3["tp8"]]
    return fit_prefill(1, [*points, point(1, 1000, TP1_1K_MS * PREFILL_1K[8])])


def one_instance_prefill(tp: int) -> PrefillFit:
    """Figure 2's ratios, anchored at 1,000 tokens of tp 1 and at 100,000 tokens of tp 8."""
    if tp == 8:
        return tp8_prefill()
    tp1_100k_ms = tp8_prefill().coefficients.time_s([(0, 100_000)]) * 1e3 / PREFILL_100K[8]
    short_ms = TP1_10_MS * (1.0 if tp == 1 else 1.08)
    return fit_prefill(
        1,
        [
            point(1, 10, short_ms),
            point(1, 1000, TP1_1K_MS * PREFILL_1K[tp]),
            point(1, 100_000, tp1_100k_ms * PREFILL_100K[tp]),
        ],
    )


def group_prefill(tp: int) -> list[PrefillFit]:
    if tp == 8:
        return []
    if tp == 1:
        digitised = [
            point(1, n, 45.0 + 0.0127 * n + 1.94e-7 * n * n) for n in (100, 1000, 10**4, 10**5)
        ]
        return [fit_prefill(8, digitised)]
    dop, rows, short_ms = {2: (4, "tp2 x 4", 38.48), 4: (2, "tp4 x 2", 35.0)}[tp]
    points = [point(batch, length, ms) for batch, length, ms, _ in FIGURE_3[rows]]
    return [fit_prefill(dop, [*points, point(1, 100, short_ms)])]


def decode_fit(
    dop: int, masters: int, alpha_ms: float, request_ms: float, kv_us: float
) -> DecodeFit:
    coefficients = DecodeCoefficients(
        alpha_s=alpha_ms / 1e3, request_s=request_ms / 1e3, kv_token_s=kv_us / 1e6
    )
    return DecodeFit(
        dop=dop,
        num_masters=masters,
        coefficients=coefficients,
        max_batch=1024,
        max_kv_tokens=1_000_000,
    )


def a800_decode(tp: int) -> list[DecodeFit]:
    alone_ms = DECODE_TP1_10_MS * DECODE_100[tp]
    if tp == 1:
        # Twice the tp 2 instance's cost of KV; requests as its arithmetic, 13.2 GFLOP each.
        return [
            decode_fit(1, 1, alone_ms, 0.08, 0.278),
            decode_fit(8, 1, 15.2, 0.08, 0.278),
            decode_fit(8, 8, 17.0, 0.08, 0.278),
        ]
    dop, rows = {2: (4, "tp2 x 4"), 4: (2, "tp4 x 2"), 8: (1, "tp8")}[tp]
    points = [DecodePoint(b, b * n, ms / 1e3) for b, n, _, ms in FIGURE_3[rows]]
    whole = fit_decode(dop, dop, points)
    c = whole.coefficients
    each_ms, kv_us = c.request_s * 1e3, c.kv_token_s * 1e6
    alone = decode_fit(1, 1, alone_ms, each_ms, kv_us)
    if dop == 1:
        return [fit_decode(1, 1, [*points, DecodePoint(1, 100, alone_ms / 1e3)])]
    # Figure 14: with one master a small batch is 1.117 times as fast as with all.
    return [alone, decode_fit(dop, 1, c.alpha_s * 1e3 / 1.117, each_ms, kv_us), whole]


def a800(tp: int) -> Profile:
    hardware = HARDWARE["A800"]
    return Profile(
        model=LLAMA2.name,
        shape=LLAMA2.key,
        device="NVIDIA A800-SXM4-80GB",
        tp=tp,
        dtype="bfloat16",
        date="2024-04-15",
        source=A800_SOURCE,
        measured=False,
        prefill=[one_instance_prefill(tp), *group_prefill(tp)],
        decode=a800_decode(tp),
        migrate=MigrateFit(
            alpha_s=0.002, token_s=LLAMA2.kv_bytes_per_token / (hardware.link_bytes * tp)
        ),
        compute_bound_batch=compute_bound_batch(LLAMA2, hardware),
        kv_bytes_per_token=LLAMA2.kv_bytes_per_token,
        link_bytes_per_s=hardware.link_bytes * tp,
    )


EXCHANGE_S = 32 * 2 * 11.6e-6
"""Decode over two instances: two captured NCCL exchanges a layer, measured at 11.6 us each."""
H200 = {
    "llama2": (
        LLAMA2,
        [(1000, 27, 25), (16000, 477, 274), (128000, 10508, 5581)],
        [(1, 1000, 4.7), (32, 4000, 21.0), (64, 1000, 14.2)],
        "prefill with tp 2 as dop 2",
    ),
    "llama3": (
        LLAMA3,
        [(1000, 36, 33), (16000, 504, 290), (128000, 10528, 5592)],
        [(1, 1000, 5.0), (8, 32000, 12.8), (32, 4000, 9.4), (64, 1000, 7.8), (256, 1000, 18.6)],
        "-",
    ),
}


def h200(which: str) -> Profile:
    facts, prefill, decode, second = H200[which]
    hardware = HARDWARE["H200"]
    measured = "prefill and decode of one GPU" + (f", {second}" if second != "-" else "")
    derived = "" if second != "-" else "prefill of two GPUs (the ratios of the llama-2-7b shape), "
    alone = fit_decode(1, 1, [DecodePoint(b, b * n, ms / 1e3) for b, n, ms in decode])
    c = alone.coefficients

    def two(masters: int) -> DecodeFit:
        return decode_fit(
            2,
            masters,
            (c.alpha_s + EXCHANGE_S) * 1e3,
            c.request_s * 1e3,
            c.kv_token_s * 1e6,
        )

    return Profile(
        model=facts.name,
        shape=facts.key,
        device="NVIDIA H200",
        tp=1,
        dtype="bfloat16",
        date="2025-01-01",
        source=(
            "Stands in until loongctl profile has run on H200. Measured with vLLM 0.26, not with "
            f"loongd: {measured}. Derived: {derived}decode over two instances (one GPU's, plus "
            "64 exchanges of 11.6 us), migration from the 229 GB/s that NVLink gave at 64 MiB."
        ),
        measured=False,
        prefill=[
            fit_prefill(1, [point(1, n, ms) for n, ms, _ in prefill]),
            fit_prefill(2, [point(1, n, ms) for n, _, ms in prefill]),
        ],
        decode=[alone, two(1), two(2)],
        migrate=MigrateFit(alpha_s=0.001, token_s=facts.kv_bytes_per_token / hardware.link_bytes),
        compute_bound_batch=compute_bound_batch(facts, hardware),
        kv_bytes_per_token=facts.kv_bytes_per_token,
        link_bytes_per_s=hardware.link_bytes,
    )


def main() -> None:
    directory = Path(sys.argv[1] if len(sys.argv) > 1 else "etc/profiles")
    directory.mkdir(parents=True, exist_ok=True)
    made = {f"a800-llama2-7b-tp{tp}": a800(tp) for tp in (1, 2, 4, 8)}
    made |= {"h200-llama2-7b-tp1": h200("llama2"), "h200-llama3-8b-tp1": h200("llama3")}
    for name, profile in made.items():
        path = directory / f"{name}.json"
        if path.exists() and load(path).measured:
            print(f"{path.name}: measured, left alone")
            continue
        path.write_text(dump_profile(profile), encoding="utf-8")
        for fit in profile.prefill:
            c = fit.coefficients
            print(
                f"{path.name} dop {fit.dop}: {c.alpha_s * 1e3:.1f} ms, "
                f"{c.beta_s * 1e3:.5f} ms/token, {c.gamma_s * 1e3:.3g} ms/token^2, "
                f"{c.item_s * 1e3:.3g} ms/request, {fit.error}"
            )
        for fit in profile.decode:
            print("   ", fit.dop, fit.num_masters, fit.coefficients, fit.error)


if __name__ == "__main__":
    main()
