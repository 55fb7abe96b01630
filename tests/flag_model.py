"""The flag protocol: attention ranks, FFN ranks, the slots between them, faults, poison, reset().

How the flag model sees memory
    A store is put *under way* and lands at any later moment, in any order, except: stores of one writer to
    one word keep their order, and a store waits for those earlier stores of its writer that a fence put
    before it (``Store.after``). No fence is stronger than the protocol needs. Header and payload are separate
    words, and each holds the request that wrote it. The last read of a slot turns them into ALREADY_READ: a
    store that lands on anything but that, or zeroed memory, destroys what nobody has read.

What is left out
    Tokens and experts (every FFN rank answers every dispatch, so routing plays no part), masked FFN ranks,
    empty items, and a reset() with a dead rank: it must fail, and the window that replaces it is new memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import combinations, product
from typing import Final, NamedTuple

from model_checker import Kind, Model, Step


@dataclass(frozen=True)
class Protocol:
    """The flag protocol as built. Each switch turned off is one mistake."""

    flag_released_after_data: bool = True
    """A writer's READY lands after its header and payload."""
    ffn_reset_fenced: bool = True
    """An FFN rank resets a dispatch flag and clears taken, and both land before it publishes the reply."""
    ffn_reset_before_publish: bool = True
    """False: it is fenced the other way round, the reset behind the reply's flag."""
    attention_reset_fenced: bool = True
    """An attention rank's reset of a reply flag lands before its next dispatch on that ring."""
    taken_cleared_after_reset: bool = True
    """A slot stays taken until the reset of its flag has landed: a queued arrive must not choose it again."""
    taken_read_before_flag: bool = True
    """An arrive reads a slot's taken mark, then its flag. False: the flag, then (later) the mark."""
    sequence_per_stage: bool = True
    """Each stage has a sequence and rings of its own. False: all stages share one sequence and its rings."""
    busy_ring_refused: bool = True
    """A dispatch whose ring is still in flight is refused. False: it is written."""
    poison_has_own_word: bool = True
    """Poison is a sticky word per peer. False: it is a third value of the flags."""
    errors_poison_peers: bool = True
    """A rank that enters the error state sets its poison word at every rank of the opposite role."""
    exception_ends_loop: bool = True
    """An exception between receive and reply is an error of the rank. False: it is swallowed."""
    failure_closes_one_region: bool = True
    """When an attention rank fails, an FFN rank serves the others on. False: it stops altogether."""
    reset_drains: bool = True
    """A rank enters reset()'s first barrier only when all its stores have landed."""
    reset_first_barrier: bool = True
    """No rank zeroes its memory before every rank has drained."""
    reset_second_barrier: bool = True
    """No rank starts again before every rank has zeroed its memory."""
    generation_checked: bool = True
    """Tickets and headers of another generation are refused."""


@dataclass(frozen=True)
class Config:
    """Who takes part, what they do, and what may befall them.

    ``programs`` holds one string per stage, run by every attention rank: D dispatches, C combines the oldest
    dispatch in flight. The stages of a rank run independently. ``items_in_flight`` is how many items an FFN
    rank may have received and not answered. ``crashes``, ``deadlines`` and ``exceptions`` bound the faults;
    each strikes at any moment or never. ``resets`` is how often all ranks call reset(), at any moment; the
    programs then start again.
    """

    attention_ranks: int = 1
    ffn_ranks: int = 1
    depth: int = 1
    programs: tuple[str, ...] = ("DCDC",)
    items_in_flight: int = 2
    crashes: int = 0
    deadlines: int = 0
    exceptions: int = 0
    resets: int = 0

    def __str__(self) -> str:
        parts = [f"{self.attention_ranks}A{self.ffn_ranks}F depth {self.depth} {'+'.join(self.programs)}"]
        happenings = {
            "crash": self.crashes,
            "deadline": self.deadlines,
            "exception": self.exceptions,
            "reset": self.resets,
        }
        parts += [name if bound == 1 else f"{bound} {name}s" for name, bound in happenings.items() if bound]
        return ", ".join(parts)


class Request(NamedTuple):
    """Which dispatch a header or payload belongs to. A request goes to every FFN rank."""

    generation: int
    stage: int
    sequence: int

    def __str__(self) -> str:
        generation = f" of generation {self.generation}" if self.generation else ""
        return f"request {self.sequence} of stage {self.stage}{generation}"


EMPTY: Final = "EMPTY"
READY: Final = "READY"
POISONED: Final = "POISONED"
NOTHING: Final = "nothing"
ALREADY_READ: Final = "already read"
CLEAR: Final = "clear"
SET: Final = "set"
Value = str | Request

RUNNING: Final = "running"
ERROR: Final = "in the error state"
DEAD: Final = "dead"
DRAINED: Final = "drained, at reset()'s first barrier"
ZEROED: Final = "zeroed, at reset()'s second barrier"

HOST_THREAD: Final = -1
"""The writer of the poison that a survivor's host thread sets when it sees a peer die."""
NO_CHANNEL: Final = -1


class Ticket(NamedTuple):
    """``lane`` is the stage whose rings are used."""

    lane: int
    ring: int
    request: Request


class Lane(NamedTuple):
    """One stage of an attention rank. ``stale`` is a ticket that the caller kept across a reset()."""

    position: int = 0
    sequence: int = 0
    in_flight: tuple[Ticket, ...] = ()
    stale: Ticket | None = None


class AttentionRank(NamedTuple):
    """The state of an attention rank; ``mode`` is RUNNING, ERROR, DEAD, DRAINED or ZEROED."""

    mode: str
    generation: int
    lanes: tuple[Lane, ...]


Item = tuple[tuple[int, Request], ...]
"""What an FFN rank received together: channel numbers, and the header read in each."""


class FfnRank(NamedTuple):
    """``items``: received, not answered, oldest first. ``seen_ready``: if flags are read before taken."""

    mode: str
    generation: int
    items: tuple[Item, ...] = ()
    closed_regions: frozenset[int] = frozenset()
    seen_ready: frozenset[int] = frozenset()


Rank = AttentionRank | FfnRank


class Store(NamedTuple):
    """A store under way; earlier stores of its writer to the words ``after`` land before it."""

    channel: int
    writer: int
    word: int
    value: Value
    after: tuple[int, ...] = ()


class Faults(NamedTuple):
    """How many more of each may strike."""

    crashes: int
    deadlines: int
    exceptions: int


class State(NamedTuple):
    """All there is: the ranks, all their memory, the stores under way, the faults that may still strike."""

    ranks: tuple[Rank, ...]
    memory: tuple[Value, ...]
    under_way: tuple[Store, ...]
    faults: Faults


class Word(NamedTuple):
    """A word of ``State.memory``."""

    owner: int
    field: str
    name: str
    zero: Value


class Slot(NamedTuple):
    """Where the words of a slot are in ``State.memory``."""

    flag: int
    header: int
    payload: int


class Channel(NamedTuple):
    """What an attention rank and an FFN rank share for one lane and ring: a slot in the memory of each."""

    number: int
    attention: int
    ffn: int
    name: str
    dispatch: Slot
    taken: int
    reply: Slot


class FlagModel(Model[State]):
    """The protocol between attention ranks and FFN ranks. Ranks are numbered attention first."""

    def __init__(self, protocol: Protocol, config: Config) -> None:
        self.protocol = protocol
        self.config = config
        world_size = config.attention_ranks + config.ffn_ranks
        self.attention = range(config.attention_ranks)
        self.ffn = range(config.attention_ranks, world_size)
        self.names = [f"A{role_rank}" for role_rank in range(config.attention_ranks)]
        self.names += [f"F{role_rank}" for role_rank in range(config.ffn_ranks)]
        self.words: list[Word] = []
        self.channels: list[Channel] = []
        self.channel_at: dict[tuple[int, int, int, int], Channel] = {}
        self.poison_at: dict[tuple[int, int], list[tuple[int, int]]] = {}
        """Where a rank is told about a peer: channel and word of every place."""
        self.poison_value = SET if protocol.poison_has_own_word else POISONED
        lanes = range(len(config.programs) if protocol.sequence_per_stage else 1)
        places = list(product(lanes, range(config.depth)))
        for attention, ffn in product(self.attention, self.ffn):
            shared = [self._new_channel(attention, ffn, lane, ring) for lane, ring in places]
            told_attention = [(channel.number, channel.reply.flag) for channel in shared]
            told_ffn = [(channel.number, channel.dispatch.flag) for channel in shared]
            if protocol.poison_has_own_word:
                told_attention = [(NO_CHANNEL, self._new_poison_word(attention, ffn))]
                told_ffn = [(NO_CHANNEL, self._new_poison_word(ffn, attention))]
            self.poison_at.update({(attention, ffn): told_attention, (ffn, attention): told_ffn})

    def _new_word(self, owner: int, field: str, name: str, zero: Value) -> int:
        self.words.append(Word(owner, field, name, zero))
        return len(self.words) - 1

    def _new_poison_word(self, owner: int, peer: int) -> int:
        name = f"poison word of {self.names[owner]} about {self.names[peer]}"
        return self._new_word(owner, "poison", name, CLEAR)

    def _new_channel(self, attention: int, ffn: int, lane: int, ring: int) -> Channel:
        place = f"(stage {lane}, ring {ring})"

        def new_slot(owner: int, writer: int) -> Slot:
            where = f"{self.names[owner]}'s slot for {self.names[writer]} {place}"
            return Slot(
                self._new_word(owner, "flag", f"flag of {where}", EMPTY),
                self._new_word(owner, "header", f"header of {where}", NOTHING),
                self._new_word(owner, "payload", f"payload of {where}", NOTHING),
            )

        whose = f"{self.names[ffn]} for {self.names[attention]} {place}"
        channel = Channel(
            len(self.channels),
            attention,
            ffn,
            f"{self.names[attention]} {place}",
            new_slot(ffn, attention),
            self._new_word(ffn, "taken", f"taken mark of {whose}", CLEAR),
            new_slot(attention, ffn),
        )
        self.channels.append(channel)
        self.channel_at[attention, ffn, lane, ring] = channel
        return channel

    def initial(self) -> State:
        config = self.config
        attention = AttentionRank(RUNNING, 0, (Lane(),) * len(config.programs))
        return State(
            (attention,) * config.attention_ranks + (FfnRank(RUNNING, 0),) * config.ffn_ranks,
            tuple(word.zero for word in self.words),
            (),
            Faults(config.crashes, config.deadlines, config.exceptions),
        )

    def steps(self, state: State) -> Iterator[Step[State]]:
        yield from self._landings(state)
        for rank, me in enumerate(state.ranks):
            if me.mode == RUNNING:
                if isinstance(me, AttentionRank):
                    yield from self._attention_steps(state, rank, me)
                else:
                    yield from self._ffn_steps(state, rank, me)
                if state.faults.crashes:
                    yield self._crash(state, rank)
            if me.mode != DEAD and me.generation < self.config.resets:
                yield from self._reset_steps(state, rank, me)

    # Memory

    @staticmethod
    def _with_rank(state: State, rank: int, changed: Rank) -> State:
        return state._replace(ranks=(*state.ranks[:rank], changed, *state.ranks[rank + 1 :]))

    @staticmethod
    def _with_words(state: State, values: dict[int, Value]) -> State:
        memory = list(state.memory)
        for word, value in values.items():
            memory[word] = value
        return state._replace(memory=tuple(memory))

    @staticmethod
    def _with_stores(state: State, stores: Iterable[Store]) -> State:
        """Put stores under way. Only their order within a channel and writer matters: only that is kept."""
        under_way = sorted((*state.under_way, *stores), key=lambda store: (store.channel, store.writer))
        return state._replace(under_way=tuple(under_way))

    def _landings(self, state: State) -> Iterator[Step[State]]:
        """A store lands unless an earlier one of its writer holds it back; a dead rank's may get lost."""
        under_way, memory = state.under_way, state.memory
        for position, store in enumerate(under_way):
            held_back = any(
                earlier.writer == store.writer and (earlier.word == store.word or earlier.word in store.after)
                for earlier in under_way[:position]
            )
            if not held_back:
                word = self.words[store.word]
                landed = state._replace(
                    memory=(*memory[: store.word], store.value, *memory[store.word + 1 :]),
                    under_way=under_way[:position] + under_way[position + 1 :],
                )
                damage = self._damage(word.field, memory[store.word], store.value)
                yield f"{store.value} lands in the {word.name}", landed, damage
        for writer, me in enumerate(state.ranks):
            rest = tuple(store for store in under_way if store.writer != writer)
            if me.mode == DEAD and rest != under_way:
                lost = state._replace(under_way=rest)
                yield f"the rest of {self.names[writer]}'s stores is lost", lost, None

    @staticmethod
    def _damage(field: str, before: Value, value: Value) -> Kind | None:
        """What a store of ``value`` destroys in a word that holds ``before``."""
        if field == "flag" and before == POISONED and value != POISONED:
            return Kind.POISON_ERASED if value == EMPTY else Kind.POISON_OVERWRITTEN
        if field == "flag" and before == READY and value == READY:
            return Kind.LOST_FLAG
        if field in ("header", "payload") and before not in (NOTHING, ALREADY_READ):
            return Kind.UNREAD_OVERWRITTEN
        return None

    def _publish(self, channel: Channel, writer: int, request: Request, *after: int) -> list[Store]:
        """The stores that fill a slot: header and payload in any order, then the flag (also ``after``)."""
        slot = channel.dispatch if writer == channel.attention else channel.reply
        if self.protocol.flag_released_after_data:
            after = (slot.header, slot.payload, *after)
        return [
            Store(channel.number, writer, slot.header, request),
            Store(channel.number, writer, slot.payload, request),
            Store(channel.number, writer, slot.flag, READY, after),
        ]

    # Failures

    def _peers(self, rank: int) -> range:
        """The ranks of the opposite role."""
        return self.ffn if rank in self.attention else self.attention

    def _poison_stores(self, writer: int, failed: int) -> list[Store]:
        """Tell every peer of ``failed``."""
        places = [place for peer in self._peers(failed) for place in self.poison_at[peer, failed]]
        return [Store(channel, writer, word, self.poison_value) for channel, word in places]

    def _poisoned_by(self, state: State, rank: int) -> list[int]:
        """The peers whose failure ``rank`` can see."""
        return [
            peer
            for peer in self._peers(rank)
            if any(state.memory[word] == self.poison_value for _, word in self.poison_at[rank, peer])
        ]

    def _fail(self, state: State, rank: int) -> State:
        """``rank`` enters the error state and tells its peers."""
        failed = self._with_rank(state, rank, state.ranks[rank]._replace(mode=ERROR))
        stores = self._poison_stores(rank, rank) if self.protocol.errors_poison_peers else []
        return self._with_stores(failed, stores)

    def _crash(self, state: State, rank: int) -> Step[State]:
        """``rank`` dies. The host thread of each peer sees it sooner or later, and sets its poison word."""
        faults = state.faults._replace(crashes=state.faults.crashes - 1)
        dead = self._with_rank(state._replace(faults=faults), rank, state.ranks[rank]._replace(mode=DEAD))
        seen = self._with_stores(dead, self._poison_stores(HOST_THREAD, rank))
        return f"{self.names[rank]} dies", seen, None

    # Attention

    def _has_finished(self, me: AttentionRank) -> bool:
        return [lane.position for lane in me.lanes] == [len(program) for program in self.config.programs]

    def _attention_steps(self, state: State, rank: int, me: AttentionRank) -> Iterator[Step[State]]:
        name = self.names[rank]
        if not self._has_finished(me):
            for peer in self._poisoned_by(state, rank):
                yield f"{name} is told that {self.names[peer]} failed, stops", self._fail(state, rank), None
        for stage, (lane, program) in enumerate(zip(me.lanes, self.config.programs, strict=True)):
            if lane.stale is not None:
                yield from self._combine_stale(state, rank, me, stage, lane.stale)
            if lane.position == len(program):
                continue
            if program[lane.position] == "D":
                yield self._dispatch(state, rank, me, stage)
            else:
                yield from self._combine(state, rank, me, stage)
                if state.faults.deadlines:
                    faults = state.faults._replace(deadlines=state.faults.deadlines - 1)
                    late = self._fail(state._replace(faults=faults), rank)
                    yield f"{name}'s combine of stage {stage} reaches its deadline", late, None

    def _with_lane(self, state: State, rank: int, me: AttentionRank, stage: int, changed: Lane) -> State:
        lanes = (*me.lanes[:stage], changed, *me.lanes[stage + 1 :])
        return self._with_rank(state, rank, me._replace(lanes=lanes))

    def _dispatch(self, state: State, rank: int, me: AttentionRank, stage: int) -> Step[State]:
        """Choose the ring, refuse it if busy, publish to every FFN rank behind the reset of its reply."""
        lane = me.lanes[stage]
        sharing = (lane,) if self.protocol.sequence_per_stage else me.lanes
        rings_of = stage if self.protocol.sequence_per_stage else 0
        sequence = sum(other.sequence for other in sharing)
        ring = sequence % self.config.depth
        is_busy = any(ticket.ring == ring for other in sharing for ticket in other.in_flight)
        if is_busy and self.protocol.busy_ring_refused:
            label = f"{self.names[rank]}'s dispatch on stage {stage} is refused: ring {ring} is busy"
            if len(lane.in_flight) < self.config.depth:
                return label, None, Kind.FALSE_BUSY
            return label, self._fail(state, rank), None
        request = Request(me.generation, stage, sequence)
        in_flight = (*lane.in_flight, Ticket(rings_of, ring, request))
        changed = Lane(lane.position + 1, lane.sequence + 1, in_flight, lane.stale)
        stores: list[Store] = []
        for ffn in self.ffn:
            channel = self.channel_at[rank, ffn, rings_of, ring]
            own_reset = (channel.reply.flag,) if self.protocol.attention_reset_fenced else ()
            stores += self._publish(channel, rank, request, *own_reset)
        dispatched = self._with_stores(self._with_lane(state, rank, me, stage, changed), stores)
        return f"{self.names[rank]} dispatches {request} on ring {ring}", dispatched, None

    def _replies_to(self, state: State, rank: int, ticket: Ticket) -> list[Channel] | None:
        """The channels that answer ``ticket``; None while one does not. A rank sees its own reset at once."""
        channels = [self.channel_at[rank, ffn, ticket.lane, ticket.ring] for ffn in self.ffn]
        own = [store for store in state.under_way if store.writer == rank]
        reset = {store.word for store in own if store.value == EMPTY}
        flags = {channel.reply.flag for channel in channels}
        has_all = all(state.memory[flag] == READY for flag in flags - reset) and flags.isdisjoint(reset)
        return channels if has_all else None

    def _compared(self, request: Request) -> tuple[int, ...]:
        """What a receiver compares."""
        return request if self.protocol.generation_checked else request[1:]

    def _combine(self, state: State, rank: int, me: AttentionRank, stage: int) -> Iterator[Step[State]]:
        """Wait for every FFN rank, check its echo, read, reset the flags."""
        lane = me.lanes[stage]
        ticket = lane.in_flight[0]
        channels = self._replies_to(state, rank, ticket)
        if channels is None:
            return
        label = f"{self.names[rank]} combines {ticket.request}"
        read: dict[int, Value] = {}
        for channel in channels:
            header, payload = state.memory[channel.reply.header], state.memory[channel.reply.payload]
            wrong: Kind | None = None
            if not isinstance(header, Request) or self._compared(header) != self._compared(ticket.request):
                wrong = Kind.FALSE_PROTOCOL_ERROR
            elif payload != header:
                wrong = Kind.TORN_READ
            elif header != ticket.request:
                wrong = Kind.MISPAIRED
            if wrong is not None:
                seen = f"{self.names[channel.ffn]}'s reply has header {header}, payload {payload}"
                yield f"{label}: {seen}", None, wrong
                return
            read.update({channel.reply.header: ALREADY_READ, channel.reply.payload: ALREADY_READ})
        changed = Lane(lane.position + 1, lane.sequence, lane.in_flight[1:], lane.stale)
        combined = self._with_lane(self._with_words(state, read), rank, me, stage, changed)
        resets = [Store(channel.number, rank, channel.reply.flag, EMPTY) for channel in channels]
        yield label, self._with_stores(combined, resets), None

    def _combine_stale(
        self, state: State, rank: int, me: AttentionRank, stage: int, ticket: Ticket
    ) -> Iterator[Step[State]]:
        """The caller hands in a ticket of before reset(): refused, unless it passes for one in flight now."""
        lane = me.lanes[stage]
        label = f"{self.names[rank]} combines {ticket.request} after reset()"
        compared = self._compared(ticket.request)
        same = [other for other in lane.in_flight if self._compared(other.request) == compared]
        if not same:
            refused = self._with_lane(state, rank, me, stage, lane._replace(stale=None))
            yield f"{label}: refused", refused, None
        elif self._replies_to(state, rank, ticket) is not None:
            yield f"{label}: is given the answer to {same[0].request}", None, Kind.MISPAIRED

    # FFN

    def _ffn_steps(self, state: State, rank: int, me: FfnRank) -> Iterator[Step[State]]:
        name, faults = self.names[rank], state.faults
        for peer in self._poisoned_by(state, rank):
            if not self.protocol.failure_closes_one_region:
                yield f"{name} is told that {self.names[peer]} failed, stops", self._fail(state, rank), None
            elif peer not in me.closed_regions:
                me_without = me._replace(closed_regions=me.closed_regions | {peer})
                closed = self._with_rank(state, rank, me_without)
                yield f"{name} is told that {self.names[peer]} failed, closes its region", closed, None
        if len(me.items) < self.config.items_in_flight:
            yield from self._receive(state, rank, me)
        if me.items:
            yield self._reply(state, rank, me)
            if faults.deadlines:
                late = state._replace(faults=faults._replace(deadlines=faults.deadlines - 1))
                yield f"{name}'s item reaches its deadline", self._fail(late, rank), None
            if faults.exceptions:
                raised = state._replace(faults=faults._replace(exceptions=faults.exceptions - 1))
                label = f"{name} raises between receive and reply"
                if self.protocol.exception_ends_loop:
                    yield f"{label}, stops", self._fail(raised, rank), None
                else:
                    swallowed = me._replace(items=me.items[1:])
                    yield f"{label}, goes on", self._with_rank(raised, rank, swallowed), None

    def _receive(self, state: State, rank: int, me: FfnRank) -> Iterator[Step[State]]:
        """Take some of the ready slots together.

        Arrive may run beside reply, on another stream: it sees the reset of a flag when that has landed. Only
        arrive sets taken, so a mark that it read as clear still is when it reads the flag, and the two reads
        are one step here. The other way round they are two.
        """
        name, memory = self.names[rank], state.memory
        ready = [
            channel
            for channel in self.channels
            if channel.ffn == rank
            and channel.attention not in me.closed_regions
            and memory[channel.dispatch.flag] == READY
        ]
        if not self.protocol.taken_read_before_flag:
            seen_ready = frozenset(channel.number for channel in ready)
            if seen_ready != me.seen_ready:
                looked = me._replace(seen_ready=seen_ready)
                yield f"{name} reads the flags", self._with_rank(state, rank, looked), None
            ready = [self.channels[number] for number in sorted(me.seen_ready)]
        ready = [channel for channel in ready if memory[channel.taken] == CLEAR]
        requests: dict[int, Request] = {}
        for channel in ready:
            header, payload = memory[channel.dispatch.header], memory[channel.dispatch.payload]
            wrong: Kind | None = None
            if header == ALREADY_READ:
                wrong = Kind.READ_TWICE
            elif not isinstance(header, Request) or self._is_foreign(header, me):
                wrong = Kind.FALSE_PROTOCOL_ERROR
            elif payload != header:
                wrong = Kind.TORN_READ
            else:
                requests[channel.number] = header
            if wrong is not None:
                yield f"{name} receives from {channel.name}: header {header}, payload {payload}", None, wrong
                return
        for size in range(1, len(ready) + 1):
            for chosen in combinations(ready, size):
                item = tuple((channel.number, requests[channel.number]) for channel in chosen)
                taken: dict[int, Value] = {channel.taken: SET for channel in chosen}
                received = me._replace(items=(*me.items, item), seen_ready=frozenset())
                label = f"{name} receives from {' and '.join(channel.name for channel in chosen)}"
                yield label, self._with_rank(self._with_words(state, taken), rank, received), None

    def _is_foreign(self, header: Request, me: FfnRank) -> bool:
        return self.protocol.generation_checked and header.generation != me.generation

    def _reply(self, state: State, rank: int, me: FfnRank) -> Step[State]:
        """Answer the oldest item, but for regions closed meanwhile: reset the flag, clear taken, publish."""
        protocol = self.protocol
        answered = [(self.channels[number], request) for number, request in me.items[0]]
        answered = [pair for pair in answered if pair[0].attention not in me.closed_regions]
        stores: list[Store] = []
        read: dict[int, Value] = {}
        for channel, request in answered:
            slot = channel.dispatch
            read.update({slot.header: ALREADY_READ, slot.payload: ALREADY_READ})
            before_clear = (slot.flag,) if protocol.taken_cleared_after_reset else ()
            reset = Store(channel.number, rank, slot.flag, EMPTY)
            clear = Store(channel.number, rank, channel.taken, CLEAR, before_clear)
            if protocol.ffn_reset_before_publish:
                before_publish = (slot.flag, channel.taken) if protocol.ffn_reset_fenced else ()
                stores += [reset, clear, *self._publish(channel, rank, request, *before_publish)]
            else:
                late_reset = reset._replace(after=(channel.reply.flag,))
                stores += [*self._publish(channel, rank, request), late_reset, clear]
        replied = self._with_rank(self._with_words(state, read), rank, me._replace(items=me.items[1:]))
        names = " and ".join(channel.name for channel, _ in answered) or "nobody: the regions are closed"
        return f"{self.names[rank]} answers {names}", self._with_stores(replied, stores), None

    # reset()

    def _reset_steps(self, state: State, rank: int, me: Rank) -> Iterator[Step[State]]:
        """Stop and drain, barrier, zero, barrier, next generation."""
        name, protocol = self.names[rank], self.protocol

        def all_at(*modes: str) -> bool:
            """Every rank is at this barrier of this generation, or past it."""
            others = [other for other in state.ranks if other.generation <= me.generation]
            return all(other.generation == me.generation and other.mode in modes for other in others)

        if me.mode in (RUNNING, ERROR):
            if not protocol.reset_drains or all(store.writer != rank for store in state.under_way):
                how = "has drained" if protocol.reset_drains else "does not drain"
                drained = me._replace(mode=DRAINED)
                yield f"{name} calls reset(), {how}", self._with_rank(state, rank, drained), None
        elif me.mode == DRAINED:
            if not protocol.reset_first_barrier or all_at(DRAINED, ZEROED):
                yield f"{name} zeroes its memory", self._zero(state, rank, me), None
        elif not protocol.reset_second_barrier or all_at(ZEROED):
            started = self._with_rank(state, rank, me._replace(mode=RUNNING, generation=me.generation + 1))
            yield f"{name} starts generation {me.generation + 1}", started, None

    def _zero(self, state: State, rank: int, me: Rank) -> State:
        zeroed: Rank = FfnRank(ZEROED, me.generation)
        if isinstance(me, AttentionRank):
            lanes = tuple(Lane(stale=lane.in_flight[0] if lane.in_flight else None) for lane in me.lanes)
            zeroed = AttentionRank(ZEROED, me.generation, lanes)
        own_words = {index: word.zero for index, word in enumerate(self.words) if word.owner == rank}
        return self._with_rank(self._with_words(state, own_words), rank, zeroed)

    # Final states

    def finished(self, state: State) -> bool:
        attention = [me for me in state.ranks if isinstance(me, AttentionRank)]
        return all(me.mode == RUNNING and self._has_finished(me) for me in attention)

    def verdict(self, state: State) -> Kind | None:
        """Nobody is left waiting or untold, survivors go on, and if nothing failed nothing is left over."""
        all_run = all(me.mode == RUNNING for me in state.ranks)
        nothing_failed = all_run and state.faults == self.initial().faults
        failed = {rank for rank, me in enumerate(state.ranks) if me.mode in (ERROR, DEAD)}
        for me in state.ranks:
            if me.mode != RUNNING:
                continue
            if isinstance(me, AttentionRank):
                if not self._has_finished(me):
                    return Kind.DEADLOCK if nothing_failed else Kind.NOT_TOLD
            elif not failed.intersection(self.attention) <= me.closed_regions:
                return Kind.NOT_TOLD
        only_crashes = not (self.config.deadlines or self.config.exceptions)
        dead = {rank for rank in failed if state.ranks[rank].mode == DEAD}
        if only_crashes and dead and dead.isdisjoint(self.ffn) and failed != dead:
            return Kind.COLLATERAL
        left_over = [
            word.name
            for word, value in zip(self.words, state.memory, strict=True)
            if value not in (word.zero, ALREADY_READ)
        ]
        return Kind.NOT_CLEAN if nothing_failed and left_over else None
