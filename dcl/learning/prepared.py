"""Prepared items on disk: plain arrays that many processes map into memory at once.

A folder holds one `.npy` for each field, all items in a row, and `index.json`, which says how long
each item is and what it is called. Counted n-grams are left out: the wide half has read them.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dcl.learning.data import Item
from dcl.splits import Split
from dcl.targets import Targets

_BY_TURN = ("agent_index", "reply_to", "vectors", "features", "wide", "step")
_BY_AGENT = ("agent", "pair")
_BY_BAG = ("task", "mode")


def save_items(items: Mapping[Split, Sequence[Item]], folder: Path) -> None:
    """Write items of all splits, with wide logits, in one step.

    Args:
        items: Items of all splits.
        folder: Where; there must be nothing yet.
    """
    rows = list(_flatten(items))
    part = folder.with_name(folder.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    for name in (*_BY_TURN, *_BY_AGENT):
        np.save(part / f"{name}.npy", np.concatenate([_field(item, name) for _, item, _ in rows]))
    for name in _BY_BAG:
        np.save(part / f"{name}.npy", np.stack([_field(item, name) for _, item, _ in rows]))
    index = {
        "splits": list(items),
        "items": [_describe(*row) for row in rows],
    }
    (part / "index.json").write_text(json.dumps(index))
    os.replace(part, folder)


def load_items(folder: Path) -> dict[Split, list[Item]]:
    """Items of all splits, in order; their arrays are read when they are used.

    Args:
        folder: As `save_items` wrote it.
    """
    # Copy on write: torch refuses arrays that nobody may write to, and nobody does.
    arrays = {
        name: np.load(folder / f"{name}.npy", mmap_mode="c")
        for name in (*_BY_TURN, *_BY_AGENT, *_BY_BAG)
    }
    index = json.loads((folder / "index.json").read_text())
    items: dict[Split, list[Item]] = {split: [] for split in index["splits"]}
    turn = agent = 0
    for bag, row in enumerate(index["items"]):
        turns = slice(turn, turn + row["turns"])
        agents = slice(agent, agent + len(row["agents"]))
        turn, agent = turns.stop, agents.stop
        item = _build(row, arrays, turns, agents, bag)
        if row["twin"]:
            items[row["split"]][-1].twin = item
        else:
            items[row["split"]].append(item)
    return items


def _flatten(items: Mapping[Split, Sequence[Item]]) -> Iterator[tuple[Split, Item, bool]]:
    """All items with their split, each followed by its twin; and whether it is one."""
    for split, members in items.items():
        for item in members:
            yield split, item, False
            if item.twin is not None:
                yield split, item.twin, True


def _field(item: Item, name: str) -> Any:
    """An array of an item or of its targets."""
    return getattr(item.targets if name in ("agent", "pair", "mode", "step") else item, name)


def _describe(split: Split, item: Item, twin: bool) -> dict[str, Any]:
    """What the index says of one item."""
    return {
        "split": split,
        "group": item.group,
        "turns": len(item.agent_index),
        "agents": item.agents,
        "known": item.targets.known,
        "lost_agents": item.targets.lost_agents,
        "lost_pairs": item.targets.lost_pairs,
        "extra": item.extra,
        "twin": twin,
    }


def _build(
    row: Mapping[str, Any], arrays: Mapping[str, Any], turns: slice, agents: slice, bag: int
) -> Item:
    """One item from its rows of all arrays."""
    targets = Targets(
        agent=arrays["agent"][agents],
        mode=arrays["mode"][bag],
        pair=arrays["pair"][agents],
        step=arrays["step"][turns],
        known=row["known"],
        lost_agents=row["lost_agents"],
        lost_pairs=row["lost_pairs"],
    )
    return Item(
        group=row["group"],
        words=(),
        task=arrays["task"][bag],
        targets=targets,
        extra=row["extra"],
        agents=tuple(row["agents"]),
        **{name: arrays[name][turns] for name in _BY_TURN if name != "step"},
    )
