"""Load balance between ranks for each way to form a Trainer's batches, on real text; nothing is trained.

    python benchmarks/sampling_balance.py
    python benchmarks/sampling_balance.py --world_sizes 16 --batch_size 32

Lengths are the token counts of the examples' packaged verse pairs. For each number of ranks, Trainer's own samplers
(with accelerate's sharding) and `--group_by_complexity` form the batches of one epoch. A step takes as long as its
slowest rank, so `step` is the padded tokens of the slowest rank, averaged over steps, relative to random order.
"""

import argparse
import sys
from pathlib import Path

import numpy as np
import torch
from accelerate.data_loader import BatchSamplerShard
from tabulate import tabulate
from torch.utils.data import BatchSampler, RandomSampler
from transformers.trainer_pt_utils import BatchRebalanceSampler, LengthGroupedSampler

from optimum_memopt.training.batches import ComplexitySampler

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))


def verse_lengths(seed: int) -> np.ndarray:
    """Returns the tokens of each training pair, counted by the tokenizer of the packaged MiniLM."""
    from common.models import packaged_tokenizer
    from common.verses import verse_pairs

    pairs = verse_pairs(seed)["train"]
    encoded = packaged_tokenizer()(pairs["sentence1"][:], pairs["sentence2"][:], truncation=True, max_length=512)
    return np.array([len(ids) for ids in encoded["input_ids"]])


def strategies(lengths: np.ndarray, size: int, world: int, accumulation: int) -> dict[str, list[list[list[int]]]]:
    """Returns the batches of each rank for each way to form them, shape (ranks, steps, samples)."""
    random = RandomSampler(lengths, generator=torch.Generator().manual_seed(0))
    by_length = LengthGroupedSampler(
        size * accumulation, lengths=lengths.tolist(), generator=torch.Generator().manual_seed(0)
    )
    ours = ComplexitySampler(lengths, size, world, fill_last=True)
    ways = {
        name: [list(BatchSamplerShard(BatchSampler(list(order), size, False), world, rank)) for rank in range(world)]
        for name, order in (("random", random), ("group_by_length", by_length), ("group_by_complexity", ours))
    }
    ways["batch_rebalance"] = [
        list(
            BatchRebalanceSampler(
                lengths.tolist(), size * accumulation * world, world, accumulation, rank=rank, drop_last=False
            )
        )
        for rank in range(world)
    ]
    return ways


def describe(ranks: list[list[list[int]]], lengths: np.ndarray) -> dict[str, float]:
    """Returns a row of the table."""
    tokens = np.array([[lengths[batch].sum() for batch in rank] for rank in ranks])
    padded = np.array([[lengths[batch].max() * len(batch) for batch in rank] for rank in ranks])
    samples = [len(batch) for rank in ranks for batch in rank]
    return {
        "tokens": (tokens.max(0) / tokens.mean(0)).mean(),
        "padded tokens": (padded.max(0) / padded.mean(0)).mean(),
        "worst step": (padded.max(0) / padded.mean(0)).max(),
        "density": tokens.sum() / padded.sum(),
        "step": padded.max(0).mean(),
        "samples": f"{min(samples)}-{max(samples)}",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world_sizes", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--batch_size", type=int, default=16, help="samples of one rank in one step")
    parser.add_argument("--accumulation", type=int, default=1, help="gradient accumulation steps")
    parser.add_argument("--samples", type=int, default=None, help="use only the first pairs; default: all")
    arguments = parser.parse_args()
    lengths = verse_lengths(seed=0)[: arguments.samples]
    quantiles = np.percentile(lengths, [0, 50, 95, 100]).astype(int)
    print(
        f"{len(lengths)} pairs, tokens: least {quantiles[0]}, median {quantiles[1]}, 95% {quantiles[2]}, most ", end=""
    )
    print(f"{quantiles[3]}; batch size {arguments.batch_size}, accumulation {arguments.accumulation}")
    for world in arguments.world_sizes:
        found = {
            name: describe(ranks, lengths)
            for name, ranks in strategies(lengths, arguments.batch_size, world, arguments.accumulation).items()
        }
        base = found["random"]["step"]
        rows = [{"batches": name} | row | {"step": row["step"] / base} for name, row in found.items()]
        print(f"\n{world} ranks, slowest rank / mean of the ranks:")
        print(tabulate(rows, headers="keys", tablefmt="github", floatfmt=".3f"))


if __name__ == "__main__":
    main()
