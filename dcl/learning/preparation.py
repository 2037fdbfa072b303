"""From labelled logs to items: reading, splitting, encoding, and the wide half."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from rich.progress import Progress, TimeElapsedColumn, track

from dcl.artifact import ENCODER, EncoderSource, hash_file, load_lexicon, save_lexicon
from dcl.bag import Bag, BagMaker
from dcl.errors import ConfigError
from dcl.formats import read_examples
from dcl.learning.config import DataConfig, TrainConfig
from dcl.learning.data import Item, VectorCache, make_item
from dcl.learning.wide import fit_idf, fit_table, stack_documents
from dcl.lexical import BIGRAM_ROWS, Lexicon
from dcl.runtime import Encoder, count_cores, load_bagger
from dcl.splits import Split, fold_of, group_of, split_of
from dcl.taxonomy import MODES
from dcl.trajectory import Example


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
    encoder = Encoder(source.path / ENCODER, threads=config.threads or count_cores(), remember=0)
    check_width(config, encoder.width)
    cache = VectorCache(
        Path(config.data.cache).expanduser(), encoder, hash_file(source.path / ENCODER)
    )
    with Progress(*Progress.get_default_columns(), TimeElapsedColumn()) as progress:
        bagged = read_bags(config, load_bagger(source), progress)
        fill(cache, [window for one in bagged for window in one.windows()], progress)
    return make_items(config, bagged, cache)


def check_width(config: TrainConfig, width: int) -> None:
    """Check that the network takes the vectors of the encoder.

    Raises:
        ConfigError: If it takes others.
    """
    if width != config.model.vector_width:
        raise ConfigError(
            f"model.vector_width: expected {width}, the width of the encoder's vectors, "
            f"got {config.model.vector_width}"
        )


@dataclass(frozen=True, slots=True, eq=False)
class Bagged:
    """A labelled example and its bag.

    Args:
        split: Where its question belongs.
        example: The example.
        extra: Whether it is not of the main set.
        bag: Its bag.
        twin: Bag of the clean run, where it is asked for.
    """

    split: Split
    example: Example
    extra: bool
    bag: Bag
    twin: Bag | None

    def windows(self) -> Iterator[NDArray[np.int32]]:
        """What the encoder reads of the turns and tasks, each `(L,)`."""
        for bag in (self.bag, self.twin):
            if bag is not None:
                yield from (*bag.windows, bag.task)


def read_bags(config: TrainConfig, bagger: BagMaker, progress: Progress) -> list[Bagged]:
    """Read, split and tokenise all examples.

    Args:
        config: Data is read, and whether twins are asked for.
        bagger: Makes the bags.
        progress: Shows how far it is.
    """
    chosen = list(select_examples(config.data))
    bagging = progress.add_task("reading turns", total=len(chosen))
    bagged = []
    for split, example, extra in chosen:
        clean = example.clean if config.loss.use_twins else None
        twin = None if clean is None else bagger(clean)
        bagged.append(Bagged(split, example, extra, bagger(example.trajectory), twin))
        progress.advance(bagging)
    return bagged


class Fillable(Protocol):
    """A cache that can be filled with a bar that shows how far it is."""

    def fill(self, windows: Sequence[NDArray[np.int32]], progress: Callable[[int], object]) -> None:
        """Compute and keep what is missing."""


def fill(
    cache: Fillable,
    windows: Sequence[NDArray[np.int32]],
    progress: Progress,
    title: str = "encoding turns",
) -> None:
    """Fill a cache.

    Args:
        cache: The cache.
        windows: Token ids of each turn, each `(L,)` int32.
        progress: Shows how far it is.
        title: Stands before the bar.
    """
    task = progress.add_task(title, total=len(windows))
    cache.fill(windows, lambda done: progress.advance(task, done))


def make_items(
    config: TrainConfig, bagged: Sequence[Bagged], cache: VectorCache, *, keep_windows: bool = False
) -> dict[Split, list[Item]]:
    """Items of all splits.

    Args:
        config: Loss width is read.
        bagged: All examples.
        cache: Turn vectors.
        keep_windows: Whether the encoder will be trained, and needs them.

    Raises:
        ConfigError: If a split has no example with labelled modes.
    """
    items: dict[Split, list[Item]] = {"train": [], "valid": [], "test": []}
    if config.data.left_out:
        items["left_out"] = []
    for one in bagged:
        item = make_item(
            one.example,
            one.bag,
            cache,
            sigma=config.loss.sigma,
            extra=one.extra,
            clean=one.twin,
            keep_windows=keep_windows,
        )
        items[one.split].append(item)
    for split in ("train", "valid"):
        if not any(item.targets.known and not item.extra for item in items[split]):
            raise ConfigError(
                f"data: expected examples with labelled modes for {split}, found none"
            )
    return items


def select_examples(config: DataConfig) -> Iterator[tuple[Split, Example, bool]]:
    """Labelled examples with their split, and whether they are extra; the rest is left out.

    A run that is known to have succeeded and that nobody labelled has no fault.

    Raises:
        ConfigError: If a framework is to be left out that no run comes from.
    """
    there: set[str] = set()
    for paths in (config.train, config.held_out, config.extra):
        for path in paths:
            examples = read_examples(Path(path).expanduser())
            for example in islice(examples, config.limit or None):
                split = split_of(
                    group_of(example), valid=config.valid_share, test=config.test_share
                )
                if paths is not config.extra:
                    there.add(str(example.trajectory.metadata.get("framework")))
                    if is_left_out(example, config):
                        split = "left_out"
                if example.faults is None and example.trajectory.outcome == "success":
                    example = replace(example, faults=())
                if example.faults is not None and (
                    paths is not config.held_out or split != "train"
                ):
                    yield split, example, paths is config.extra
    for name in config.left_out:
        if name not in there:
            raise ConfigError(
                f"data.left_out: expected frameworks out of {', '.join(sorted(there))}, "
                f"got {name!r}"
            )


def is_left_out(example: Example, config: DataConfig) -> bool:
    """Whether a run comes from a framework that nothing may be learnt from."""
    return example.trajectory.metadata.get("framework") in config.left_out


def read_definitions(source: EncoderSource, threads: int) -> NDArray[np.float32]:
    """What the encoder makes of title and definition of each mode: `(M, E)`, unit norm.

    Args:
        source: Encoder and tokenizer.
        threads: Of the encoder; > 0.
    """
    encoder = Encoder(source.path / ENCODER, threads=threads, remember=0)
    return encoder(window_definitions(load_bagger(source)))


def window_definitions(bagger: BagMaker) -> list[NDArray[np.int32]]:
    """Token ids of title and definition of each mode, each `(L,)`.

    Args:
        bagger: Of the encoder.
    """
    texts = [f"{mode.title}. {mode.definition}" for mode in MODES]
    return [bagger.window(ids) for ids in bagger.tokenize(texts)]


def fit_wide(
    config: TrainConfig, items: Mapping[Split, Sequence[Item]], vocabulary: int, work: Path
) -> Lexicon:
    """Fit the wide half and give every item its wide logits.

    Training items get theirs from lexicons that never saw their question: on its own training data
    the wide half is near perfect, which would leave the network nothing to learn.

    Args:
        config: Folds, and the fields whose names begin with `wide_`, are read.
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
        config: Folds, and the fields whose names begin with `wide_`, are read.
        train: Training items; those with labelled modes that are not extra are fitted on.
        vocabulary: Number of token ids.
        files: Where each fit goes; those that are there stay.
    """
    usable = [item for item in train if item.targets.known and not item.extra]
    documents = [document for item in usable for document in item.words]
    folds = [fold_of(item.group, config.folds) for item in usable for _ in item.words]
    labels = np.concatenate([item.targets.pair for item in usable])
    runs = np.repeat(np.arange(len(usable)), [len(item.words) for item in usable])
    idf = fit_idf(
        documents,
        vocabulary + BIGRAM_ROWS,
        most=config.wide_rows,
        leading=None if config.wide_bigrams else vocabulary,
        weigh=config.wide_idf,
    )
    stacked = stack_documents(documents, idf)
    for fold, file in enumerate(track(files, "fitting the wide half")):
        if not file.exists():
            rows = np.array(folds) != fold
            table = fit_table(
                stacked[rows],
                labels[rows],
                strength=config.wide_strength,
                runs=runs[rows],
                contrast=config.wide_contrast,
            )
            save_lexicon(Lexicon(idf, table, config.wide_contrast), file)
