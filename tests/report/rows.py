"""Rows as the ledger holds them, and hostile ones."""

from __future__ import annotations

from typing import Any

HOSTILE = "</script><script>window.hacked=1</script><img src=x onerror=window.hacked=1>"


def learned(method: str, seed: int = 0, shift: float = 0.0, **more: Any) -> dict[str, Any]:
    """A run of two tasks of two classes after a base task of four; `shift` moves its accuracies."""
    accuracy = [0.9 + shift, 0.8 + shift, 0.7 + shift]
    row = {
        "date": f"2026-01-0{seed + 1}T00:00:00+00:00", "recipe": "toy", "command": f"krnet learn {method}",
        "settings": {"budget": None, "tasks": [4, 2, 2], "data": "digits"}, "seed": seed, "class_order": "natural",
        "seconds": 10.0 + seed, "outcome": "ok", "corrects": None, "commit": "abc1234", "device": "cpu",
        "metrics": {
            "method": method, "data": "digits", "tasks": [4, 2, 2], "accuracy": accuracy, "last": accuracy[-1],
            "accuracy_matrix": [[accuracy[0]], [accuracy[1], 0.5], [accuracy[2], 0.4, 0.6]],
            "forgetting": 0.1, "storage_bytes": {"total": 1_000_000},
        },
    }  # fmt: skip
    return row | more


def recorded(recorder: str, budget: int, r2: float, seed: int = 0) -> dict[str, Any]:
    return {
        "date": "2026-01-05T00:00:00+00:00", "recipe": "toy-rate", "command": "krnet bench rate", "seed": seed,
        "settings": {"recorder": recorder, "given": {}, "budget": budget, "num_samples": 100, "iterations": None,
                     "time_budget": None},
        "metrics": {"bytes": budget - 10 * seed - 1, "r2": r2, "mse": 1 - r2, "replay_accuracy": r2,
                    "real_accuracy": 0.99},
        "seconds": 1.0, "outcome": "ok", "corrects": None, "commit": "abc1234",
    }  # fmt: skip


def hostile() -> dict[str, Any]:
    """Every text of the row tries to become a script."""
    row = learned(HOSTILE, seed=0)
    row |= {name: HOSTILE for name in ("recipe", "command", "commit", "device", "class_order")}
    row["metrics"] |= {"data": HOSTILE, "order": HOSTILE}
    row["settings"] |= {"data": HOSTILE, "base": HOSTILE, "reads": "=HYPERLINK(1)"}
    return row


def toy_rows() -> list[dict[str, Any]]:
    """Two methods with three seeds, one with one seed, two recorders, and two rows that are not drawn."""
    return [
        *(learned("kril", seed, 0.01 * seed) for seed in range(3)),
        *(learned("joint", seed, 0.05 + 0.001 * seed) for seed in range(3)),
        learned("ewc", 0, -0.2),
        *(recorded(name, budget, r2) for name, r2 in (("pca", 0.9), ("krnet", 0.99)) for budget in (10_000, 20_000)),
        learned("mas", 0, outcome="RuntimeError: it broke"),
        {**learned("ncm", 0), "metrics": {**learned("ncm")["metrics"], "validation": 50}},
    ]
