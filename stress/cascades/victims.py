"""Who is signalled, how, when, and when they serve again."""

from __future__ import annotations

import random
import signal
from dataclasses import dataclass, field
from time import monotonic_ns

import numpy as np
import psutil

from stress.cascades import words
from stress.cascades.history import Kind
from stress.cascades.oracle.faults import WHOLE, Mode, Role, code
from stress.cascades.rig import Rig
from stress.cascades.trees import ACTORS, Held, Tree

#: Drawn in this proportion.  Whole trees cost seconds, a worker's standby most of one.
WEIGHTS = {
    Role.LISTENER: 38,
    Role.WORKER: 20,
    Role.LISTENER_STANDBY: 9,
    Role.WORKER_STANDBY: 4,
    Role.PLAYER: 27,
    Role.SUPERVISOR: 1,
    Role.TREE: 1,
}
MODES = {Mode.KILL: 76, Mode.PAUSE: 17, Mode.HANG: 7}
PAUSES_S = (0.001, 0.02, 0.1, 0.15, 0.5, 1.2)
LONG_PAUSE_S = 3.4  # longer than a peer may be silent
AIMS = (None, None, None, words.BOOTSTRAPPING, words.WAITING, words.TRANSFERRING, words.FAILED)
ROWS = {
    Role.LISTENER: ACTORS["listener"],
    Role.WORKER: ACTORS["worker"],
    Role.LISTENER_STANDBY: ACTORS["listener-standby"],
    Role.WORKER_STANDBY: ACTORS["worker-standby"],
}


@dataclass(frozen=True)
class Plan:
    role: Role
    tree: int
    mode: Mode
    pause_s: float


def draw(source: random.Random, trees_count: int) -> Plan:
    role = source.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
    mode = source.choices(list(MODES), list(MODES.values()))[0]
    if mode is Mode.HANG and role not in ROWS:
        mode = Mode.PAUSE
    pause_s = source.choice(PAUSES_S)
    if role is Role.TREE and source.random() < 0.2:
        pause_s = LONG_PAUSE_S
    return Plan(role, source.randrange(trees_count), mode, pause_s)


def wait_for(tree: Tree, state: int | None, until_ns: int) -> bool:
    """Spin until a room of the tree is in the state (Failed: and not quiet).  False if none was."""
    if state is None:
        return False
    while monotonic_ns() < until_ns:
        states = tree.view.states()
        found = states == state
        if state == words.FAILED:
            found &= (tree.view.words >> np.uint64(4) & np.uint64(1)) == 0
        if found.any():
            return True
    return False


@dataclass
class Strike:
    """One signal, until the role serves again."""

    plan: Plan
    at_ns: int
    victims: list[Held]
    identity: int = 0  # of an actor: what its row held
    continue_ns: int = 0  # when to send SIGCONT; 0: not, or done
    killed: bool = False
    orphans: list[Held] = field(default_factory=list)
    relaunched: bool = False
    lost: bool = False  # its whole tree died: there is no role any more to come back to

    def close(self) -> None:
        for held in (*self.victims, *self.orphans):
            held.close()


def contradict(one: Strike, other: Strike) -> bool:
    """Is one to stay stopped until it is killed as hung, and continued by the other?"""
    pids = {held.pid for held in one.victims} & {held.pid for held in other.victims}
    return bool(pids) and {one.plan.mode, other.plan.mode} == {Mode.HANG, Mode.PAUSE}


class Executioner:
    def __init__(self, rig: Rig) -> None:
        self._rig = rig
        self.pending: list[Strike] = []

    def strike(self, plans: list[Plan], cycle: int) -> int:
        """All at one instant; returns how many there were to hit."""
        strikes: list[Strike] = []
        for plan in plans:
            busy = [each.plan for each in (*self.pending, *strikes) if each.plan.tree == plan.tree]
            engine = plan.role is Role.PLAYER
            in_the_way = [p for p in busy if (p.role is Role.PLAYER if engine else p.role in WHOLE)]
            prepared = None if in_the_way else self._prepare(plan)
            if prepared is None:
                continue
            if any(contradict(prepared, other) for other in (*self.pending, *strikes)):
                prepared.close()
                continue
            strikes.append(prepared)
        for strike in strikes:
            sent = signal.SIGKILL if strike.killed else signal.SIGSTOP
            strike.at_ns = monotonic_ns()
            for held in strike.victims:
                held.signal(sent)
            for held in strike.victims:
                what = int(sent) << 32 | code(strike.plan.mode, strike.plan.role)
                self._rig.writer.append(
                    Kind.SIGNAL, cycle, strike.plan.tree, held.pid, what, strike.at_ns
                )
            if strike.plan.mode is Mode.PAUSE:
                strike.continue_ns = strike.at_ns + int(strike.plan.pause_s * 1e9)
        self.pending += strikes
        return len(strikes)

    def _prepare(self, plan: Plan) -> Strike | None:
        """Hold the victims.  None if there is nobody in that role just now."""
        tree = self._rig.trees[plan.tree]
        strike = Strike(plan, 0, [], killed=plan.mode is Mode.KILL)
        try:
            if plan.role is Role.PLAYER:
                player = self._rig.players[plan.tree]
                assert player is not None
                strike.victims.append(Held(player.pid))
            elif plan.role in ROWS:
                strike.identity = tree.view.identity(ROWS[plan.role])
                pid = strike.identity & 0xFFFF_FFFF
                if not pid:  # nobody, or just being launched
                    return None
                strike.victims.append(Held(pid))
            else:
                family = psutil.Process(tree.pid).children(recursive=True)
                children = [Held(process.pid) for process in family]
                strike.victims.append(Held(tree.pid))
                where = strike.victims if plan.role is Role.TREE else strike.orphans
                where.extend(children)
        except (ProcessLookupError, psutil.NoSuchProcess):
            strike.close()
            return None
        return strike

    def turn(self) -> None:
        """Follow every strike."""
        self._rig.reap()
        self._rig.check_players({strike.plan.tree for strike in self.pending})
        now_ns = monotonic_ns()
        for strike in list(self.pending):
            if strike.continue_ns and now_ns >= strike.continue_ns:
                strike.continue_ns = 0
                for held in strike.victims:
                    held.signal(signal.SIGCONT)
                    self._rig.writer.append(Kind.CONTINUED, 0, strike.plan.tree, held.pid)
            if self._is_back(strike):
                self._end(strike)

    def _is_back(self, strike: Strike) -> bool:
        plan, tree = strike.plan, self._rig.trees[strike.plan.tree]
        if strike.continue_ns:
            return False
        dead = strike.victims[0].dead()
        if plan.role is Role.PLAYER:
            if not dead:
                return not strike.killed
            return self._revive_player(strike)
        if plan.role in ROWS:
            if plan.mode is Mode.PAUSE and not dead:
                return True
            if tree.lost:
                strike.lost = True
                return True
            return dead and tree.view.serves(ROWS[plan.role], strike.identity)
        if not strike.killed:
            return True
        return self._revive_tree(strike, tree)

    def _revive_player(self, strike: Strike) -> bool:
        number = strike.plan.tree
        if not strike.relaunched:
            self._note_dead(strike.victims)
            held = self._rig.players[number]
            assert held is not None
            held.close()
            strike.relaunched = True
            self._rig.start_player(number)
        if any(s.plan.tree == number and s.plan.role in WHOLE for s in self.pending):
            # It serves once its tree is back.
            strike.lost = True
            return True
        return self._rig.player_serves(number)

    def _revive_tree(self, strike: Strike, tree: Tree) -> bool:
        if not strike.relaunched:
            if not all(held.dead() for held in (*strike.victims, *strike.orphans)):
                return False
            self._note_dead([*strike.victims, *strike.orphans])
            strike.relaunched = True
            tree.launch()
        return tree.serves()

    def _note_dead(self, helds: list[Held]) -> None:
        for held in helds:
            self._rig.writer.append(Kind.DEAD, 0, b=held.pid)

    def _end(self, strike: Strike) -> None:
        self.pending.remove(strike)
        role = strike.plan.role
        if role in ROWS:
            self._note_dead([held for held in strike.victims if held.dead()])
        took_ns = monotonic_ns() - strike.at_ns
        what = int(role) if strike.lost else code(strike.plan.mode, role)
        self._rig.writer.append(Kind.BACK, took_ns, strike.plan.tree, what, strike.victims[0].pid)
        strike.close()
