"""From labelled logs to items: reading, splitting, encoding, and the wide half."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich.progress import Progress, TimeElapsedColumn, track

from dcl.artifact import ENCODER, EncoderSource, hash_file, load_lexicon, save_lexicon
from dcl.config import DataConfig, TrainConfig
from dcl.data import Item, VectorCache, make_item
from dcl.errors import ConfigError
from dcl.formats import read_examples
from dcl.lexical import BIGRAM_ROWS, Lexicon
from dcl.runtime import Encoder, count_cores, load_bagger
from dcl.splits import Split, fold_of, group_of, split_of
from dcl.taxonomy import MODES
from dcl.trajectory import Example
from dcl.wide import fit_idf, fit_table, stack_documents


def prepare(config: TrainConfig, source: EncoderSource) -> dict[Split, list[Item]]:
    """Read, split, tokenise and encode all examples.

    Args:
        config: Data and loss width are read.
        source: Encoder and tokenizer.

    Returns:
        Items of the three splits.

    Raises:
        ConfigError: If a split has no example with labelled modes, or the widths do not fit.
    """
    bagger = load_bagger(source)
    encoder = Encoder(source.path / ENCODER, threads=config.threads or count_cores(), remember=0)
    if encoder.width != config.model.vector_width:
        raise ConfigError(
            f"model.vector_width: expected {encoder.width}, the width of the encoder's vectors, "
            f"got {config.model.vector_width}"
        )
    cache = VectorCache(
        Path(config.data.cache).expanduser(), encoder, hash_file(source.path / ENCODER)
    )
    chosen = list(select_examples(config.data))
    items: dict[Split, list[Item]] = {"train": [], "valid": [], "test": []}
    if config.data.left_out:
        items["left_out"] = []
    with Progress(*Progress.get_default_columns(), TimeElapsedColumn()) as progress:
        bagging = progress.add_task("reading turns", total=len(chosen))
        bags, twins = [], []
        for _, example, _ in chosen:
            bags.append(bagger(example.trajectory))
            wanted = config.loss.use_twins and example.clean is not None
            twins.append(bagger(example.clean) if wanted and example.clean else None)
            progress.advance(bagging)
        windows = [
            window
            for bag in (*bags, *twins)
            if bag is not None
            for window in (*bag.windows, bag.task)
        ]
        encoding = progress.add_task("encoding turns", total=len(windows))
        cache.fill(windows, lambda done: progress.advance(encoding, done))
    for (split, example, extra), bag, twin in zip(chosen, bags, twins, strict=True):
        items[split].append(
            make_item(example, bag, cache, sigma=config.loss.sigma, extra=extra, clean=twin)
        )
    for split in ("train", "valid"):
        if not any(item.targets.known and not item.extra for item in items[split]):
            raise ConfigError(
                f"data: expected examples with labelled modes for {split}, found none"
            )
    return items


def select_examples(config: DataConfig) -> Iterator[tuple[Split, Example, bool]]:
    """Labelled examples with their split, and whether they are extra; the rest is left out.

    A run that is known to have succeeded and that nobody labelled has no fault.
    """
    for paths in (config.train, config.held_out, config.extra):
        for path in paths:
            examples = read_examples(Path(path).expanduser())
            for example in islice(examples, config.limit or None):
                split = split_of(
                    group_of(example), valid=config.valid_share, test=config.test_share
                )
                if paths is not config.extra and is_left_out(example, config):
                    split = "left_out"
                if example.faults is None and example.trajectory.outcome == "success":
                    example = replace(example, faults=())
                if example.faults is not None and (
                    paths is not config.held_out or split != "train"
                ):
                    yield split, example, paths is config.extra


def is_left_out(example: Example, config: DataConfig) -> bool:
    """Whether a run comes from a framework that nothing may be learnt from."""
    return example.trajectory.metadata.get("framework") in config.left_out


def read_definitions(source: EncoderSource, threads: int) -> NDArray[np.float32]:
    """What the encoder makes of title and definition of each mode: `(M, E)`, unit norm.

    Args:
        source: Encoder and tokenizer.
        threads: Of the encoder; > 0.
    """
    bagger = load_bagger(source)
    texts = [f"{mode.title}. {mode.definition}" for mode in MODES]
    windows = [bagger.window(ids) for ids in bagger.tokenize(texts)]
    return Encoder(source.path / ENCODER, threads=threads, remember=0)(windows)


def fit_wide(
    config: TrainConfig, items: Mapping[Split, Sequence[Item]], vocabulary: int, work: Path
) -> Lexicon:
    """Fit the wide half and give every item its wide logits.

    Training items get theirs from lexicons that never saw their question: on its own training data
    the wide half is near perfect, which would leave the network nothing to learn.

    Args:
        config: Strength and folds are read.
        items: Items of all splits; their `wide` is filled in.
        vocabulary: Number of token ids.
        work: Keeps what is fitted, so that a resumed run does not fit it again.

    Returns:
        The wide half fitted on all training items.
    """
    files = [work / f"wide-{fold}.npz" for fold in range(config.folds + 1)]
    if not all(file.exists() for file in files):
        fit_folds(config, items["train"], vocabulary, files)
    lexicons = [load_lexicon(file) for file in files]
    whole = lexicons[-1]  # no item is in the fold after the last: this one saw them all
    for split, members in items.items():
        for item in members:
            fold = fold_of(item.group, config.folds)
            lexicon = lexicons[fold] if split == "train" else whole
            for one in (item, item.twin):
                if one is not None:
                    one.wide = lexicon(one.words, len(one.agent_index))
    return whole


def fit_folds(
    config: TrainConfig, train: Sequence[Item], vocabulary: int, files: Sequence[Path]
) -> None:
    """Fit the wide half once without each fold, and last on everything.

    Args:
        config: Strength and folds are read.
        train: Training items; those with labelled modes that are not extra are fitted on.
        vocabulary: Number of token ids.
        files: Where each fit goes; those that are there stay.
    """
    usable = [item for item in train if item.targets.known and not item.extra]
    documents = [document for item in usable for document in item.words]
    folds = [fold_of(item.group, config.folds) for item in usable for _ in item.words]
    labels = np.concatenate([item.targets.pair for item in usable])
    idf = fit_idf(documents, vocabulary + BIGRAM_ROWS, most=config.wide_rows)
    stacked = stack_documents(documents, idf)
    for fold, file in enumerate(track(files, "fitting the wide half")):
        if not file.exists():
            rows = np.array(folds) != fold
            table = fit_table(stacked[rows], labels[rows], strength=config.wide_strength)
            save_lexicon(Lexicon(idf=idf, table=table), file)
