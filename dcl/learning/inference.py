"""Scoring with torch: the reference that an exported model must agree with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from dcl.artifact import ENCODER, LEXICON, WEIGHTS, Artifact, load_lexicon, open_artifact
from dcl.attribution import Attributor, Logits
from dcl.bag import Bag
from dcl.errors import ArtifactError
from dcl.learning.data import Item, collate
from dcl.learning.model import BagLogits, Model, ModelConfig, Network, number_names
from dcl.lexical import Lexicon
from dcl.runtime import OUTPUTS, Encoder, count_cores, head_inputs, load_bagger


@torch.no_grad()
def score_items(
    model: Model | Network, items: Sequence[Item], *, batch_size: int = 32
) -> list[Logits]:
    """Logits of prepared items, without padding, in order.

    Args:
        model: The network; it is put into evaluation mode.
        items: Prepared items.
        batch_size: Items that are padded together; > 0.

    Returns:
        One an item.
    """
    model.eval()
    scores: list[Logits] = []
    for start in range(0, len(items), batch_size):
        chunk = items[start : start + batch_size]
        batch = collate(chunk)
        out: BagLogits = model(*batch.bags, names=batch.names)
        for b, item in enumerate(chunk):
            count, agents = len(item.agent_index), len(item.targets.agent)
            scores.append(
                Logits(
                    agent=out.agent[b, :agents].numpy(),
                    mode=out.mode[b].numpy(),
                    pair=out.pair[b, :agents].numpy(),
                    step=out.step[b, :count].numpy(),
                    attention=out.attention[b, :count].numpy(),
                )
            )
    return scores


class TorchScorer:
    """Scores bags with torch; the reference that an exported model must agree with.

    Args:
        encoder: Turn encoder.
        model: The network.
        lexicon: Wide half.
    """

    def __init__(self, encoder: Encoder, model: Model, lexicon: Lexicon) -> None:
        self.encoder = encoder
        self.model = model.eval()
        self.lexicon = lexicon

    @torch.no_grad()
    def __call__(self, bags: Sequence[Bag]) -> list[Logits]:
        """Score bags one by one."""
        return [self._score(bag) for bag in bags]

    def _score(self, bag: Bag) -> Logits:
        vectors = self.encoder([*bag.windows, bag.task])
        inputs = head_inputs(bag, vectors[:-1], vectors[-1], self.lexicon)
        tensors = [torch.from_numpy(array)[None] for _, array in inputs]
        names = torch.tensor([number_names(bag.agents, self.model.config)])
        out: BagLogits = self.model(*tensors, names=names)
        return Logits(*(getattr(out, name)[0].numpy() for name in OUTPUTS))


def load_trained(path: Path) -> Attributor:
    """An attributor that runs a trained, not yet exported model with torch.

    Raises:
        ArtifactError: If the folder is missing or damaged.
    """
    artifact = open_artifact(path)
    scorer = TorchScorer(
        Encoder(path / ENCODER, threads=count_cores()),
        load_model(artifact),
        load_lexicon(path / LEXICON),
    )
    return Attributor(load_bagger(artifact), scorer, artifact.calibration)


def load_model(artifact: Artifact) -> Model:
    """The network of a trained model, in evaluation mode.

    Raises:
        ArtifactError: If it holds no weights for torch, or they do not fit this version.
    """
    file = artifact.path / WEIGHTS
    if WEIGHTS not in artifact.manifest["files"]:
        raise ArtifactError(f"{file}: expected weights; give a folder that `dcl train` wrote")
    try:
        # Models from before vectors were centred do not say so, and were trained on whole ones.
        model = Model(ModelConfig(**{"centre_text": False, **artifact.model}))
        model.load_state_dict(load_file(file))
    except (RuntimeError, TypeError, SafetensorError) as error:
        raise ArtifactError(
            f"{file}: the weights do not fit this version of dcl: "
            f"{' '.join(str(error).split())[:200]}"
        ) from None
    return model.eval()
