"""The attribution network, from turn vectors to logits, top to bottom.

Letters: `B` bags, `T` turns, `A` agents, `M` = 14 modes, `D` width, `E` width of a turn vector,
`F` features, `H` heads, `K` width of the prototype space.

The turn encoder stands before it and has its own graph, so that a new turn costs one encoder call
and the whole bag one cheap call of this network. Bags are padded: a padded turn belongs to no
agent, a padded agent has no turn. Agents are slots of a trajectory: no name enters, and listing the
slots in another order permutes the output and changes nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dcl.errors import ConfigError
from dcl.features import FEATURE_GROUPS, FEATURES
from dcl.taxonomy import MODES

M = len(MODES)
RELATIONS = ("past", "past", "future", "future", "same", "same", "reply", "replied")
"""What each head of a context layer may look at by default; one set of weights a head."""
FAR = 1e30
"""Distance at which no head sees anything, however flat its slope has become."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Shape of the network and its switches."""

    vector_width: int = 384
    """Width of a turn vector, as the encoder gives it."""
    width: int = 256
    """Width of a turn inside the network; a multiple of the context heads."""
    layers: int = 2
    """Context layers over the turns; 0 looks at each turn alone."""
    context_heads: tuple[str, ...] = RELATIONS
    """What each head of a context layer may look at: earlier turns (`past`), later ones (`future`),
    turns of the same agent (`same`), the turn that it answers (`reply`), those that answer it
    (`replied`), or `any`."""
    dropout: float = 0.2
    """Share of activations dropped in training, 0 to 1."""
    prototype_width: int = 128
    """Width of the space in which evidence is compared with prototypes."""
    prototypes: int = 4
    """Prototypes of each error mode."""
    archetypes: int = 8
    """Role archetypes in the agent bank."""
    rank: int = 64
    """Rank of the bilinear pair head."""
    members: int = 1
    """Networks that differ in their seed and whose logits are averaged."""
    use_text: bool = True
    """Read the turn vectors."""
    centre_text: bool = True
    """Read each of them less the mean of its run: how a turn differs, not what all are about."""
    use_features: bool = True
    """Read the features of a turn: layout, cues, relations and deviation."""
    feature_groups: tuple[str, ...] = tuple(FEATURE_GROUPS)
    """Which groups of them are read: `layout`, `cues`, `relations`, `deviation`."""
    use_wide: bool = True
    """Read the wide lexical half and add it to the pair logits."""
    use_mix: bool = True
    """Add the product gate of agent and mode score to the pair logits."""
    use_bilinear: bool = True
    """Add the low-rank bilinear form to the pair logits."""
    use_error_bank: bool = True
    """Score modes by cosine to the error prototypes; otherwise by a linear layer."""
    use_agent_bank: bool = True
    """Describe agents by their soft match with the role archetypes."""
    closed_agents: bool = False
    """Give each agent name of the training set a prototype of its own, in place of the archetypes.
    Such a network knows no other name and cannot be exported; for the ablation only (Aegis)."""
    agent_names: tuple[str, ...] = ()
    """Names with a prototype; training fills them in where `closed_agents` is set."""
    use_gate: bool = True
    """Gate the attention by a sigmoid (Ilse et al. 2018, eq. 9); otherwise it is their eq. 8."""
    use_mode_queries: bool = True
    """Look for the evidence of each mode with a query of its own, and for that of the agent as a
    whole; otherwise the agent's finds the evidence of all."""
    evidence_turns: int = 0
    """Turns kept as evidence of an agent and mode, those with most attention (Aegis: 3); 0 for all.
    """
    bag_evidence: bool = False
    """Take evidence from all turns of the bag, the same for every agent (Aegis), not from the
    agent's own."""
    level_heads: bool = False
    """Score agents and modes by themselves, held together by the hierarchy loss alone (Aegis);
    otherwise they are sums of pairs."""

    def __post_init__(self) -> None:
        """Refuse shapes that cannot work."""
        for name in (
            "vector_width",
            "width",
            "prototype_width",
            "prototypes",
            "archetypes",
            "rank",
            "members",
        ):
            if getattr(self, name) < 1:
                raise ConfigError(f"model.{name}: expected at least 1, got {getattr(self, name)}")
        check_names("model.context_heads", self.context_heads, {*RELATIONS, "any"})
        check_names("model.feature_groups", self.feature_groups, FEATURE_GROUPS)
        groups = tuple(name for name in FEATURE_GROUPS if name in self.feature_groups)
        object.__setattr__(self, "feature_groups", groups)
        for name in ("context_heads", "agent_names"):
            object.__setattr__(self, name, tuple(getattr(self, name)))  # JSON has lists only
        if self.width % len(self.context_heads):
            raise ConfigError(
                f"model.width: expected a multiple of the {len(self.context_heads)} "
                f"model.context_heads, got {self.width}"
            )
        if min(self.layers, self.evidence_turns) < 0 or not 0 <= self.dropout < 1:
            raise ConfigError(
                f"model: expected layers and evidence_turns >= 0 and dropout from 0 to below 1, "
                f"got {self.layers}, {self.evidence_turns} and {self.dropout}"
            )
        if self.agent_names and not self.closed_agents:
            raise ConfigError("model.agent_names: expected none, as closed_agents is not set")


def check_names(place: str, got: Sequence[str], known: Collection[str]) -> None:
    """Refuse a list of names that cannot be meant.

    Args:
        place: What to call it in the message.
        got: The list.
        known: Names that may stand in it.

    Raises:
        ConfigError: If it is empty, or a name is not known.
    """
    if not got or not set(got) <= set(known):
        raise ConfigError(
            f"{place}: expected some of {', '.join(sorted(known))}, got {', '.join(got) or 'none'}"
        )


class BagTensors(NamedTuple):
    """A padded batch of bags."""

    vectors: Tensor
    """`(B, T, E)` float32, unit norm."""
    task: Tensor
    """`(B, E)` float32, unit norm."""
    features: Tensor
    """`(B, T, F)` float32."""
    wide: Tensor
    """`(B, T, M)` float32, wide logits split by turn."""
    reply_to: Tensor
    """`(B, T)` int64, -1 where there is none."""
    member: Tensor
    """`(B, A, T)` float32, 1 where the turn is the agent's."""


class BagLogits(NamedTuple):
    """Logits of a padded batch; entries of padded turns and agents mean nothing."""

    agent: Tensor
    """`(B, A)`."""
    mode: Tensor
    """`(B, M)`."""
    pair: Tensor
    """`(B, A, M)`."""
    step: Tensor
    """`(B, T)`, before softmax over turns."""
    attention: Tensor
    """`(B, T, M)`, before softmax over the turns of one agent."""
    evidence: Tensor
    """`(B, A, M, K)`, unit norm: evidence in the prototype space."""


class ContextLayer(nn.Module):
    """Attention over turns in which each head follows one relation, then a feed-forward layer.

    Args:
        config: Width, dropout and context heads are read.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads = len(config.context_heads)
        self.norm = nn.LayerNorm(config.width)
        self.project = nn.Linear(config.width, 3 * config.width)
        self.merge = nn.Linear(config.width, config.width)
        self.slope = nn.Parameter(torch.zeros(self.heads))
        self.feed = nn.Sequential(
            nn.LayerNorm(config.width),
            nn.Linear(config.width, 2 * config.width),
            nn.GELU(),
            nn.Dropout(config.dropout),
            nn.Linear(2 * config.width, config.width),
        )
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, turns: Tensor, distance: Tensor) -> Tensor:
        """Let each turn look at its relations.

        Args:
            turns: `(B, T, D)`.
            distance: `(B, H, T, T + 1)`, what `measure_distance` gives.

        Returns:
            `(B, T, D)`.
        """
        B, T, D = turns.shape
        query, key, value = (
            self.project(self.norm(turns))
            .view(B, T, 3, self.heads, D // self.heads)
            .permute(2, 0, 3, 1, 4)
        )  # each (B, H, T, D/H)
        # One place more, with a logit of 0, to look at nothing: the first turn has no past.
        key, value = F.pad(key, (0, 0, 0, 1)), F.pad(value, (0, 0, 0, 1))  # (B, H, T + 1, D/H)
        query = query / math.sqrt(D // self.heads)
        logits = query @ key.transpose(-1, -2) - F.softplus(self.slope)[:, None, None] * distance
        mixed = (logits.softmax(dim=-1) @ value).transpose(1, 2).reshape(B, T, D)
        turns = turns + self.dropout(self.merge(mixed))
        fed: Tensor = self.dropout(self.feed(turns))
        return turns + fed


class Network(nn.Module):
    """Turn vectors, features and wide logits in; agent, mode, pair and step logits out.

    Args:
        config: Shape and switches.

    Source:
        Aegis (arXiv 2509.14295) §5.3 for banks, pair heads and evidence; Ilse et al. 2018 for the
        gated attention.
    """

    feature_mean: Tensor
    feature_scale: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        D, K = config.width, config.prototype_width
        self.register_buffer("feature_mean", torch.zeros(len(FEATURES)))
        self.register_buffer("feature_scale", torch.ones(len(FEATURES)))
        self.read_text = nn.Linear(2 * config.vector_width, D)
        self.read_features = nn.Sequential(nn.Linear(len(FEATURES), D), nn.GELU(), nn.Linear(D, D))
        self.read_wide = nn.Linear(2 * M, D)
        self.input_norm = nn.LayerNorm(D)
        self.context = nn.ModuleList(ContextLayer(config) for _ in range(config.layers))
        self.output_norm = nn.LayerNorm(D)
        self.gate_value = nn.Linear(D, K)
        self.gate_open = nn.Linear(D, K)
        self.query = nn.Linear(K, M + 1)  # one query a mode, and one for the agent as a whole
        self.to_error_space = nn.Linear(D, K)
        self.error_bank = nn.Parameter(torch.randn(M, config.prototypes, K))
        self.error_scale = nn.Parameter(torch.tensor(math.log(5.0)))
        self.score_mode = nn.Parameter(torch.randn(M, D) / math.sqrt(D))
        self.to_agent_space = nn.Linear(D, K)
        self.agent_bank = nn.Parameter(torch.randn(config.archetypes, K))
        self.score_agent = nn.Linear(D + K, 1)
        self.bilinear_agent = nn.Linear(D + K, config.rank)
        self.bilinear_error = nn.Linear(D, config.rank)
        self.mix_strength = nn.Parameter(torch.tensor(1.0))
        self.wide_mix = nn.Parameter(torch.eye(M))
        self.pair_bias = nn.Parameter(torch.full((M,), -1.0))
        self.agent_bias = nn.Parameter(torch.tensor(0.0))
        self.mode_bias = nn.Parameter(torch.tensor(0.0))
        self.score_step = nn.Linear(D, 1)
        nn.init.zeros_(self.score_step.weight)  # silent until a labelled step teaches it
        nn.init.zeros_(self.score_step.bias)
        self.dropout = nn.Dropout(config.dropout)
        if config.closed_agents:
            self.name_bank = nn.Parameter(torch.randn(len(config.agent_names), K))

    def forward(
        self,
        vectors: Tensor,
        task: Tensor,
        features: Tensor,
        wide: Tensor,
        reply_to: Tensor,
        member: Tensor,
        names: Tensor | None = None,
        apart: Tensor | None = None,
    ) -> BagLogits:
        """Score a padded batch of bags; the arguments are those of `BagTensors`.

        `names`, `(B, A)` int64 as `number_names` gives it, is read by a closed bank alone; without
        it every agent is unknown to the bank. `apart`, `(B,)` bool, marks bags whose step logits
        send their gradient to the step head and no further.
        """
        turns = self.read(vectors, task, features, wide, member)  # (B, T, D)
        allowed = relate(reply_to, member, self.config.context_heads)
        distance = measure_distance(allowed)  # (B, H, T, T + 1)
        for layer in self.context:
            turns = layer(turns, distance)
        turns = self.output_norm(turns)
        attention = self.attend(turns)  # (B, T, M + 1)
        log_weights = self.weigh(attention, member)  # (B, A, T, M + 1)
        # One plain product: onnxruntime takes several times as long for an einsum.
        weights = log_weights.exp().transpose(2, 3)  # (B, A, M + 1, T)
        evidence = (weights.flatten(1, 2) @ turns).unflatten(1, weights.shape[1:3])
        pair, suspicion, match, space = self.score_pairs(
            evidence[:, :, :M], evidence[:, :, M], wide, member, names
        )
        real = member.sum(dim=2)[..., None] > 0  # (B, A, 1)
        masked = (match if self.config.level_heads else pair).masked_fill(~real, -1e4)
        if self.config.level_heads:
            agent = suspicion
            mode = masked.logsumexp(dim=1) - real.sum(dim=1).log()
        else:
            agent = pair.logsumexp(dim=2)
            mode = masked.logsumexp(dim=1)
        return BagLogits(
            agent=agent + self.agent_bias,
            mode=mode + self.mode_bias,
            pair=pair,
            step=self.score_steps(turns, pair, log_weights[..., :M], member, apart),
            attention=attention[..., :M],
            evidence=space,
        )

    def read(
        self, vectors: Tensor, task: Tensor, features: Tensor, wide: Tensor, member: Tensor
    ) -> Tensor:
        """Each turn's own input, before any context: `(B, T, D)`."""
        if self.config.centre_text:
            real = member.sum(dim=1, keepdim=True)  # (B, 1, T)
            vectors = vectors - real @ vectors / real.sum(dim=2, keepdim=True)
        text = self.read_text(torch.cat([vectors, vectors * task[:, None]], dim=-1) * 8.0)
        scaled = ((features - self.feature_mean) / self.feature_scale).clamp(-5.0, 5.0)
        if set(self.config.feature_groups) < set(FEATURE_GROUPS):
            scaled = scaled * self.mask_features(scaled)
        by_agent = member.transpose(1, 2) @ (member @ wide)  # (B, T, M): the turn's agent's logits
        read: Tensor = self.input_norm(
            self.dropout(text) * self.config.use_text
            + self.dropout(self.read_features(scaled)) * self.config.use_features
            + self.dropout(self.read_wide(torch.cat([wide, by_agent], -1))) * self.config.use_wide
        )
        return read

    def mask_features(self, like: Tensor) -> Tensor:
        """1 for each feature that is read, 0 for the others: `(F,)`, of the type of `like`."""
        read = {name for group in self.config.feature_groups for name in FEATURE_GROUPS[group]}
        return like.new_tensor([name in read for name in FEATURES])

    def attend(self, turns: Tensor) -> Tensor:
        """How much each turn, `(B, T, D)`, looks like evidence for each query: `(B, T, M + 1)`."""
        value = torch.tanh(self.gate_value(turns))
        if self.config.use_gate:
            value = value * torch.sigmoid(self.gate_open(turns))
        attention: Tensor = self.query(value)
        if not self.config.use_mode_queries:
            attention = attention[..., M:].expand_as(attention)
        return attention

    def weigh(self, attention: Tensor, member: Tensor) -> Tensor:
        """Log of the evidence weight of each turn for each agent and query: `(B, A, T, M + 1)`.

        Args:
            attention: `(B, T, M + 1)`.
            member: `(B, A, T)`.
        """
        own = member[..., None] > 0  # (B, A, T, 1)
        if self.config.bag_evidence:
            own = own.any(dim=1, keepdim=True).expand_as(own)
        scores = attention[:, None].masked_fill(~own, -1e4)
        if not self.config.evidence_turns:
            return scores.log_softmax(dim=2)
        kept = min(self.config.evidence_turns, scores.shape[2])
        least = scores.topk(kept, dim=2).values[:, :, -1:]
        # Bounded from below, so that a labelled step outside the evidence costs a finite loss.
        return scores.masked_fill(scores < least, -1e4).log_softmax(dim=2).clamp(min=-20.0)

    def score_pairs(
        self, evidence: Tensor, agent: Tensor, wide: Tensor, member: Tensor, names: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Pair logits and what they are made of.

        Args:
            evidence: `(B, A, M, D)`, what each agent's turns say about each mode.
            agent: `(B, A, D)`, what they say about the agent as a whole.
            wide: `(B, T, M)`.
            member: `(B, A, T)`.
            names: `(B, A)` int64, for a closed bank.

        Returns:
            `(B, A, M)` pair logits, `(B, A)` logits of the agents and `(B, A, M)` of the modes
            that they come from, and `(B, A, M, K)` unit vectors, the evidence in the prototype
            space.
        """
        space = F.normalize(self.to_error_space(evidence), dim=-1)  # (B, A, M, K)
        if self.config.use_error_bank:
            cosine = torch.einsum("bamk,mpk->bamp", space, F.normalize(self.error_bank, dim=-1))
            scale = self.error_scale.exp()
            mode = (scale * cosine).logsumexp(dim=-1) - math.log(self.config.prototypes)
        else:
            mode = torch.einsum("bamd,md->bam", evidence, self.score_mode)
        role = F.normalize(self.to_agent_space(agent), dim=-1)  # (B, A, K)
        known = self.describe_roles(role, names) * self.config.use_agent_bank  # (B, A, K)
        described = torch.cat([agent, known], dim=-1)
        pair = mode + self.pair_bias
        suspicion = self.score_agent(described)  # (B, A, 1)
        if self.config.closed_agents:
            suspicion = suspicion + 10.0 * (role * known).sum(dim=-1, keepdim=True)
        if self.config.use_mix:
            both = log_sigmoid(suspicion) + log_sigmoid(mode)  # log p(a) p(m)
            both = both.clamp(max=-1e-4)
            pair = pair + self.mix_strength * (both - torch.log1p(-both.exp()))
        if self.config.use_bilinear:
            left = self.bilinear_agent(described)[:, :, None]  # (B, A, 1, rank)
            pair = pair + (left * self.bilinear_error(evidence)).sum(-1) / math.sqrt(
                self.config.rank
            )
        if self.config.use_wide:
            pair = pair + (member @ wide) @ self.wide_mix
        return pair, suspicion.squeeze(-1), mode, space

    def describe_roles(self, role: Tensor, names: Tensor | None) -> Tensor:
        """What the agent bank knows of each agent: `(B, A, K)`.

        Args:
            role: `(B, A, K)` unit vectors, what each agent does.
            names: `(B, A)` int64, for a closed bank; an unknown name has the zero vector.
        """
        if self.config.closed_agents:
            bank = F.pad(F.normalize(self.name_bank, dim=-1), (0, 0, 1, 0))  # row 0: unknown
            chosen = torch.zeros(role.shape[:2], dtype=torch.int64) if names is None else names
            return bank[chosen.to(role.device)]
        bank = F.normalize(self.agent_bank, dim=-1)
        return (role @ bank.T * 10.0).softmax(dim=-1) @ bank

    def score_steps(
        self,
        turns: Tensor,
        pair: Tensor,
        log_weights: Tensor,
        member: Tensor,
        apart: Tensor | None = None,
    ) -> Tensor:
        """Step logits: the log of the pair probability that flows to each turn as its evidence.

        Args:
            turns: `(B, T, D)`.
            pair: `(B, A, M)`.
            log_weights: `(B, A, T, M)`, log of the evidence weights.
            member: `(B, A, T)`.
            apart: `(B,)` bool, bags whose gradient ends at the step head; None means none.

        Returns:
            `(B, T)`.
        """
        flow = (log_weights + log_sigmoid(pair)[:, :, None]).logsumexp(dim=-1)  # (B, A, T)
        if apart is not None:
            flow = torch.where(apart[:, None, None], flow.detach(), flow)
            turns = torch.where(apart[:, None, None], turns.detach(), turns)
        own: Tensor = self.score_step(turns).squeeze(-1)
        return (flow * member).sum(dim=1) + own


class Model(nn.Module):
    """What ships: networks that were trained alike from different seeds, averaged.

    Args:
        config: Shape, switches, and the number of members.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.members = nn.ModuleList(Network(config) for _ in range(config.members))

    def __iter__(self) -> Iterator[Network]:
        """The members."""
        return (network for network in self.members if isinstance(network, Network))

    def forward(
        self,
        vectors: Tensor,
        task: Tensor,
        features: Tensor,
        wide: Tensor,
        reply_to: Tensor,
        member: Tensor,
        names: Tensor | None = None,
    ) -> BagLogits:
        """Mean logits of the members; the arguments are those of `Network.forward`."""
        outputs = [
            network(vectors, task, features, wide, reply_to, member, names) for network in self
        ]
        if len(outputs) == 1:  # nothing to average: a smaller graph
            return BagLogits(*outputs[0])
        return BagLogits(*(torch.stack(part).mean(dim=0) for part in zip(*outputs, strict=True)))


def number_names(agents: Sequence[str], config: ModelConfig) -> list[int]:
    """Position of each agent's name in a closed bank, from 1 on; 0 for a name outside it.

    Args:
        agents: Names of the agents of a trajectory.
        config: Its `agent_names` are read.
    """
    place = {name: i for i, name in enumerate(config.agent_names, start=1)}
    return [place.get(name, 0) for name in agents]


def log_sigmoid(x: Tensor) -> Tensor:
    """`ln(1 / (1 + exp(-x)))`, any shape, in a form that stays exact in a graph.

    The exporter writes `F.logsigmoid` as the log of a sigmoid, which onnxruntime rounds to 0 from
    -18 on.
    """
    return -F.softplus(-x)


def relate(reply_to: Tensor, member: Tensor, names: Sequence[str]) -> Tensor:
    """Which turns each head may look at.

    Args:
        reply_to: `(B, T)` int64.
        member: `(B, A, T)` float32.
        names: `H` relations, one a head.

    Returns:
        `(B, H, T, T)` bool in the order of `names`; row = the turn that looks.
    """
    T = reply_to.shape[1]
    order = torch.arange(T, device=reply_to.device)
    real = member.sum(dim=1) > 0  # (B, T)
    both = real[:, :, None] & real[:, None, :]
    past = (order[:, None] > order[None, :])[None] & both
    future = (order[:, None] < order[None, :])[None] & both
    same = (member.transpose(1, 2) @ member > 0) & both
    reply = (reply_to[:, :, None] == order[None, None, :]) & both
    relations = {
        "past": past,
        "future": future,
        "same": same,
        "reply": reply,
        "replied": reply.transpose(1, 2),
        "any": both,
    }
    return torch.stack([relations[name] for name in names], dim=1)


def measure_distance(allowed: Tensor) -> Tensor:
    """How far each turn is from what its heads may look at.

    At 2,000 turns such a tensor has 128 MB, so all layers share this one, and each makes as few of
    its size as it can.

    Args:
        allowed: `(B, H, T, T)` bool, what `relate` gives.

    Returns:
        `(B, H, T, T + 1)` float32: `ln(1 + turns between)`, `FAR` where a head may not look, and
        0 for the last place, which is nothing.
    """
    order = torch.arange(allowed.shape[-1], device=allowed.device)
    gaps = torch.log1p((order[:, None] - order[None, :]).abs().float())  # (T, T)
    return F.pad(torch.where(allowed, gaps, FAR), (0, 1))
