"""One graph of what waits for what: a deadlock is a cycle in it, and the time of a step its longest path.

Nodes are the actions of a schedule, and one transfer for each message. An action waits for the one before it on its
rank; the consumer of a message for its transfer; a transfer for its SEND (or, where sends are not written out, for its
producer), and for the transfers before it in its chains. Transports differ in the chains alone:

    tags      none: messages are told apart
    directed  one chain a channel (from rank to rank): first in, first out
    pair      one chain a pair of ranks, for both directions: a two-rank communicator of NCCL
    rank      one chain a rank

Both ends put a message into the chain in the order in which they send and receive, so that ends which disagree are a
cycle. With `capacity` c, the i-th SEND of a channel waits until the receiver has posted its (i - c)-th RECV.

Every rank and every chain is a sequence, so what runs does not depend on who is faster: without a cycle there is no
deadlock, in any interleaving.
"""

from __future__ import annotations

from typing import NoReturn

from fmeg.pipeline.costs import Costs
from fmeg.pipeline.errors import DeadlockError, ScheduleError
from fmeg.pipeline.schedule import COMPUTE, Schedule
from fmeg.pipeline.wires import Wires

TRANSPORTS = ("tags", "directed", "pair", "rank")


class Graph:
    """The graph of a schedule; nodes are numbers, the actions rank by rank and then the transfers.

    >>> schedule = Schedule.from_text("0F0 0B0\\n1F0 1B0").with_messages()
    >>> Graph(schedule, Costs(), "directed", capacity=0).run()[-1]
    4.0
    """

    def __init__(self, schedule: Schedule, costs: Costs, transport: str = "tags", capacity: int | None = None):
        if transport not in TRANSPORTS:
            raise ScheduleError(f"order: transport must be one of {', '.join(TRANSPORTS)}, given {transport!r}")
        if capacity is not None and capacity < 0:
            raise ScheduleError(f"order: capacity must be None or at least 0, given {capacity}")
        self.schedule, self.costs = schedule, costs
        self.actions = [action for line in schedule.actions for action in line]
        self.transfers = len(self.actions)  # the first node that is a transfer
        self.rank: list[int] = []  # of each action
        self.after: list[int] = []  # the next action of the rank, or -1
        self.waits: list[int] = []  # how many nodes each node waits for
        for rank, line in enumerate(schedule.actions):
            if line:
                begin = len(self.rank)
                self.rank += [rank] * len(line)
                self.after += [*range(begin + 1, len(self.rank)), -1]
                self.waits += [0, *[1] * (len(line) - 1)]
        self.other = [-1] * self.transfers  # another node that waits for it, or -1
        self.more: dict[int, list[int]] = {}  # the rest of them
        self.sends: list[int] = []  # of each transfer: its SEND, or where these are not written out its producer
        self.receives: list[int] = []  # of each transfer: its RECV, or -1
        self.cost = self._costs(costs)
        self._messages(costs)
        if transport != "tags":
            self._chains(transport)
        if capacity is not None:
            self._buffers(capacity)

    def _costs(self, costs: Costs) -> list[float]:
        table = {kind: costs.per_stage(kind, self.schedule.stages) for kind in COMPUTE}
        cost = [table[a[0]][a[1]] if a[0] in table else 0.0 for a in self.actions]
        if costs.pair is not None:
            for pair in self._pairs().items():
                for node in pair:
                    cost[node] *= costs.pair
        return cost

    def _pairs(self) -> dict[int, int]:
        """The second action of each pair -> the first."""
        compute = [node for node, action in enumerate(self.actions) if action.kind in COMPUTE]
        return {b: a for a, b in zip(compute, compute[1:], strict=False) if self.actions[a].pair}

    def link(self, before: int, after: int) -> None:
        """`after` waits for `before`."""
        self.waits[after] += 1
        if self.other[before] < 0:
            self.other[before] = after
        else:
            self.more.setdefault(before, []).append(after)

    def _messages(self, costs: Costs) -> None:
        wires = Wires.of(self.schedule)
        joint = self._pairs() if costs.pair is not None else {}
        last_of = {first: second for second, first in joint.items()}
        transfer: dict[int, int] = {}
        for key, node in (wires.sent or wires.producer).items():
            transfer[key] = at = len(self.waits)
            self.sends.append(node)
            self.receives.append(wires.received.get(key, -1))
            self.waits.append(0)
            self.other.append(-1)
            self.link(last_of.get(node, node), at)
        self.cost += [costs.hop] * len(transfer)
        for key, node in wires.consumer.items():
            if key not in transfer:
                raise ScheduleError(
                    f"order: {self.actions[node]} on rank {self.rank[node]} waits for a message that nobody sends"
                )
            self.link(transfer[key], node)
            if node in joint:
                self.link(transfer[key], joint[node])

    def _chains(self, transport: str) -> None:
        ranks, count = self.schedule.ranks, len(self.waits)
        chains: dict[int, list[int]] = {}
        for at, (send, receive) in enumerate(zip(self.sends, self.receives, strict=True), self.transfers):
            a, b = self.rank[send], self.rank[receive]
            chain = a * ranks + b if transport == "directed" else min(a, b) * ranks + max(a, b)
            for owner, node in ((a, send), (b, receive)):
                key = owner if transport == "rank" else chain * ranks + owner
                chains.setdefault(key, []).append(node * count + at)
        for members in chains.values():
            nodes = [member % count for member in sorted(members)]
            for before, after in zip(nodes, nodes[1:], strict=False):
                self.link(before, after)

    def _buffers(self, capacity: int) -> None:
        channels: dict[tuple[int, int], tuple[list[int], list[int]]] = {}
        for send, receive in zip(self.sends, self.receives, strict=True):
            sends, receives = channels.setdefault((self.rank[send], self.rank[receive]), ([], []))
            sends.append(send)
            receives.append(receive)
        for sends, receives in channels.values():
            for send, receive in zip(sorted(sends)[capacity:], sorted(receives), strict=False):
                self.link(receive, send)

    def run(self) -> list[float]:
        """When each node ends. DeadlockError if there is a cycle."""
        waits, other, more, cost = self.waits.copy(), self.other, self.more, self.cost
        after = self.after + [-1] * (len(waits) - self.transfers)
        end = [0.0] * len(waits)  # until a node has run: when the last of what it waits for has ended
        ready = [node for node, count in enumerate(waits) if not count]
        left = len(waits)
        while ready:
            node = ready.pop()
            left -= 1
            now = end[node] = end[node] + cost[node]
            for then in (after[node], other[node]):
                if then >= 0:
                    if now > end[then]:
                        end[then] = now
                    waits[then] -= 1
                    if not waits[then]:
                        ready.append(then)
            if node in more:
                for then in more[node]:
                    if now > end[then]:
                        end[then] = now
                    waits[then] -= 1
                    if not waits[then]:
                        ready.append(then)
        if left:
            self._deadlock(waits)
        return end

    def _deadlock(self, waits: list[int]) -> NoReturn:
        """Walk back from a node that could not run, always to one that it waits for, until one comes again."""
        stuck = [node for node, count in enumerate(waits) if count]
        before: dict[int, list[int]] = {}
        head: dict[int, int] = {}  # where each rank stands
        for node in stuck:
            if node < self.transfers:
                head.setdefault(self.rank[node], node)
            for then in (self.other[node], *self.more.get(node, ())):
                if then >= 0:
                    before.setdefault(then, []).append(node)
        node = next(iter(head.values()))
        path: dict[int, int] = {}
        while node not in path:
            stands = head[self.rank[node]] if node < self.transfers else node
            path[node] = stands if stands != node else before[node][0]
            node = path[node]
        names, begin = [], node
        while True:
            names.append(self._wait(node, path[node]))
            node = path[node]
            if node == begin:
                break
        cycle = tuple(filter(None, names))
        raise DeadlockError("\n  ".join(["deadlock, a cycle of waits:", *cycle]), cycle)

    def _wait(self, node: int, cause: int) -> str:
        """Why a node waits for another; a transfer that waits for its own send needs no words."""
        if node < self.transfers:
            who = f"rank {self.rank[node]}: {self.actions[node]}"
            if cause >= self.transfers:
                return f"{who} waits for {self._named(cause)}"
            if self.rank[cause] == self.rank[node]:
                return f"{who} comes after {self.actions[cause]}"
            return f"{who} waits for room until rank {self.rank[cause]} posts {self.actions[cause]}"
        if cause >= self.transfers:
            return f"{self._named(node)} comes, in their channel, after {self._named(cause)}"
        return ""

    def _named(self, transfer: int) -> str:
        send = self.sends[transfer - self.transfers]
        return f"{self.actions[send]} of rank {self.rank[send]}"
