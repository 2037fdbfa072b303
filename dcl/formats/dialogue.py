"""The turns of one trace: every thing said once, although spans repeat the whole history."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from dcl.formats.genai import Said, kind_of_span, said, tool_use, values
from dcl.formats.messages import Mark, Piece, call_text, text_of
from dcl.formats.spans import Span
from dcl.formats.spantree import SpanTree, own_name
from dcl.trajectory import Turn, TurnKind

_TOOL_KINDS = (TurnKind.TOOL_CALL, TurnKind.TOOL_RESULT)


class Dialogue:
    """Walks a trace in time order and keeps what is new.

    What a span was told is new as far as it occurs more often there than in the turns so far.
    What a span answered is new, but for a span around others: that one repeats them. A tool call
    is told by the model's span and by the tool's: the second of the two is left out.

    Args:
        tree: The spans of one trace.
    """

    def __init__(self, tree: SpanTree) -> None:
        self._tree = tree
        self._said = {span.id: said(span) for span in tree.spans}
        # Plain values of chains repeat what the messages inside say, and often in pieces.
        self._has_messages = any(any(content) for content in self._said.values())
        self._around = self._find_around()
        self._turns: list[Turn] = []
        self._known: Counter[Mark] = Counter()
        self._ids: set[Mark] = set()
        self._waiting: dict[str, Counter[Mark]] = {"model": Counter(), "tool": Counter()}
        self._tools: dict[str, str] = {}
        self._failed: dict[str, list[int]] = {}  # error to the places of spans that had it

    def turns(self) -> list[Turn]:
        """The turns; none if the spans hold no content."""
        for span, opens in self._moments():
            if kind_of_span(span) == "tool":
                self._use_tool(span, opens)
                continue
            told, answered = self._content(span)
            if opens:
                self._hear(span, told)
            else:
                self._answer(span, answered)
        return self._turns

    def _find_around(self) -> set[str]:
        """Ids of spans around others that say something."""
        around: set[str] = set()
        for span in reversed(self._tree.downward):
            above = self._tree.above(span)
            if above is not None and (span.id in around or self._speaks(span)):
                around.add(above.id)
        return around

    def _speaks(self, span: Span) -> bool:
        """Whether a span has any content of its own."""
        use = kind_of_span(span) == "tool"
        return use or any(self._said[span.id]) or any(self._values(span))

    def _moments(self) -> Iterator[tuple[Span, bool]]:
        """Each span twice, as it opens and as it closes, in time order.

        A span without others inside closes at once: by start time its answer stands before
        what it set off.
        """
        moments = []
        last: dict[str, int] = {}
        # Deepest first: whatever the clocks say, a span closes after all that it holds.
        for span in sorted(self._tree.spans, key=self._tree.start_by_depth, reverse=True):
            time, depth, order = self._tree.start(span)
            moments.append(((time, 1, depth, order, 0), span, True))
            closes = time + 1
            if span.id in self._around:
                closes = max(span.end, closes, last.get(span.id, 0))
                moments.append(((closes, 0, -depth, order, 1), span, False))
            else:
                moments.append(((time, 1, depth, order, 1), span, False))
            if (above := self._tree.above(span)) is not None:
                last[above.id] = max(last.get(above.id, 0), closes)
        moments.sort(key=lambda moment: moment[0])
        return ((span, opens) for _, span, opens in moments)

    def _content(self, span: Span) -> Said:
        """The messages of a span, or the plain values of one that stands alone."""
        told, answered = self._said[span.id]
        if span.id in self._around or (told and answered):
            return told, answered
        more_told, more_answered = self._values(span)
        return told or more_told, answered or more_answered

    def _values(self, span: Span) -> Said:
        """The plain values of a span, where they are worth reading."""
        kind = kind_of_span(span)
        if kind == "aside" or (self._has_messages and kind not in ("agent", "model")):
            return [], []
        return values(span)

    def _hear(self, span: Span, told: Sequence[Piece]) -> None:
        """Keep the messages of the input that nobody has said yet."""
        here: Counter[Mark] = Counter()
        for piece in told:
            mark = piece.mark
            here[mark] += 1
            seen = here[mark] <= self._known[mark]
            if not seen and (piece.group, piece.call) not in self._ids:
                self._keep(piece, piece.speaker(self._tree.owner(span)), span)

    def _answer(self, span: Span, answered: Sequence[Piece]) -> None:
        """Keep the output, and the error if there is one."""
        before = len(self._turns)
        for piece in answered:
            if span.id in self._around and self._known[piece.mark]:
                self._take("tool", piece.mark)
                continue
            if piece.kind is TurnKind.TOOL_CALL and self._is_second("model", piece):
                continue
            agent = own_name(span) if piece.kind is not TurnKind.TOOL_RESULT else ""
            self._keep(piece, agent or piece.speaker(self._tree.owner(span)), span)
        self._fail(span, before, self._tree.owner(span), TurnKind.MESSAGE)

    def _use_tool(self, span: Span, opens: bool) -> None:
        """Keep the call as the span opens, and the result as it closes."""
        use = tool_use(span)
        owner = self._tree.owner(span)
        if opens:
            text = call_text(use.name, use.arguments)
            piece = Piece("assistant", text, TurnKind.TOOL_CALL, call=use.call, tool=use.name)
            if not self._is_second("tool", piece):
                self._keep(piece, owner, span)
            target = text_of(span.attributes.get("gen_ai.transfer.target.name"))
            if target:
                handoff = Piece("assistant", f"transfer to {target}", TurnKind.HANDOFF)
                self._keep(handoff, owner, span)
            return
        before = len(self._turns)
        if use.result is not None and ("result", use.call) not in self._ids:
            piece = Piece("tool", use.result, TurnKind.TOOL_RESULT, call=use.call, tool=use.name)
            self._keep(piece, use.name, span)
        self._fail(span, before, use.name, TurnKind.TOOL_RESULT)

    def _is_second(self, side: str, piece: Piece) -> bool:
        """Whether the other side has told this call already."""
        mark = piece.mark
        waited = self._take("tool" if side == "model" else "model", mark)
        if waited or (piece.group, piece.call) in self._ids:
            return True
        self._waiting[side][mark] += 1
        return False

    def _take(self, side: str, mark: Mark) -> bool:
        """Cross off one call that a side has told; False if there is none."""
        waits = self._waiting[side][mark] > 0
        self._waiting[side][mark] -= waits
        return waits

    def _keep(self, piece: Piece, agent: str, span: Span) -> None:
        """Add a turn."""
        self._known[piece.mark] += 1
        if piece.call and piece.kind in _TOOL_KINDS:
            self._ids.add((piece.group, piece.call))
        if piece.kind is TurnKind.TOOL_CALL and piece.call:
            self._tools[piece.call] = piece.tool
        if piece.kind is TurnKind.TOOL_RESULT and agent == "tool":
            agent = self._tools.get(piece.call) or agent
        self._turns.append(piece.turn(agent, span.id))

    def _fail(self, span: Span, before: int, agent: str, kind: TurnKind) -> None:
        """Add the error of a span to its last turn; spans around it repeat the same error."""
        if not span.error:
            return
        failed = self._failed.setdefault(span.error, [])
        place, end = self._tree.extent(span)
        repeated = bisect_right(failed, end) > bisect_right(failed, place)
        insort(failed, place)
        if repeated:
            return
        text = f"error: {span.error}"
        if len(self._turns) > before:
            last = self._turns[-1]
            self._turns[-1] = replace(last, content=f"{last.content}\n{text}".lstrip("\n"))
        else:
            self._turns.append(Turn(agent=agent, content=text, kind=kind, source=span.id))
