"""Turns decisions into plans: charges slots, opens segments, numbers steps.

The numbers of steps and segments only grow, so a late report of a dropped step, or a late free,
can never be taken for a newer one.
"""

from __future__ import annotations

from collections.abc import Iterable

from loongd.sched.events import Migrate, RunDecode, RunPrefill
from loongd.sched.instance import Step
from loongd.sched.plan import DecodeItem, DecodePlan, MigratePlan, PrefillItem, PrefillPlan
from loongd.sched.policy import Placed, StartDecode, StartMigrate, StartPart, StartPrefill
from loongd.sched.request import Phase, Request
from loongd.sched.sib import Sib
from loongd.sched.state import State
from loongd.sched.story import StoryEntry
from loongd.sched.words import describe_decode, name_instances, plural


class Starter:
    """Starts steps on a state; foretells the queued ones with a SIB."""

    def __init__(self, state: State, sib: Sib | None = None) -> None:
        self._state = state
        self._sib = sib
        self._num_steps = 0
        self._num_segments = 0
        self._num_begun = 0

    def prefill(self, start: StartPrefill, now: float) -> RunPrefill:
        """Charge each prompt where it is kept, and put its members to work."""
        state = self._state
        step_id = self.next_step()
        items = tuple(self._place(placed, start.members, step_id) for placed in start.items)
        plan = PrefillPlan(step_id, start.members, items, start.layers)
        self._begin_prefill(plan, tuple(placed.request for placed in start.items), now)
        keepers = {i for item in items for i, _ in item.keep}
        state.totals.num_scale_downs += len(keepers) < len(start.members)
        for item in items:
            entry = StoryEntry(
                now, "prefill", start.reason, group=start.members, kept=dict(item.keep)
            )
            if item.start:
                state.stories.begin_chunk(item.request_id, entry)
            else:
                state.stories.add(item.request_id, entry)
        return RunPrefill(plan, start.reason)

    def go_on(self, start: StartPart, now: float) -> RunPrefill:
        """Put the members of a chunk to work on its next layers."""
        request, before = start.request, start.request.part
        assert before is not None, request
        assert before.layers is not None, request
        assert request.step_id is None, request
        assert before.layers.end == start.layers.first < start.layers.end, request
        step_id = request.step_id = request.last_step_id = self.next_step()
        members, items = before.members, before.items
        plan = PrefillPlan(step_id, members, items, start.layers, before.step_id)
        self._begin_prefill(plan, (request,), now)
        entry = StoryEntry(now, "prefill", start.reason, group=members)
        self._state.stories.begin_chunk(request.request_id, entry, is_part=True)
        return RunPrefill(plan, start.reason)

    def _begin_prefill(self, plan: PrefillPlan, requests: tuple[Request, ...], now: float) -> None:
        state = self._state
        self._begin(Step(plan, requests, now))
        is_whole = plan.layers is None and all(i.start == 0 and i.samples for i in plan.items)
        for instance in plan.members:
            view = state.instances[instance]
            view.owes_decode = True
            view.chunk_turn = is_whole
        state.totals.num_prefill_steps += 1
        for request in requests:
            request.part = plan if plan.pauses else None
            if not plan.resumes:
                request.chunk_began_s, request.chunk_s = now, 0.0
            state.tally.touch(request)

    def migrate(self, start: StartMigrate, now: float) -> Migrate:
        """Charge the target for what the source keeps until the move is done."""
        state, source = self._state, start.source
        step_id = self.next_step()
        moves: list[tuple[int, int]] = []
        for request in start.requests:
            assert (request.phase, request.step_id) == (Phase.DECODE, None), request
            for segment in request.segments:
                num_slots = state.pool.counts(segment).get(source, 0)
                if num_slots:
                    state.pool.allocate(segment, start.target, num_slots)
                    request.num_migrating += num_slots
                    moves.append((segment, num_slots))
            request.holders = tuple(sorted({*request.holders, start.target}))
            request.step_id, request.wanted, request.migrated_s = step_id, None, now
            state.tally.touch(request)
            entry = StoryEntry(now, "migrated", start.reason, group=(source, start.target))
            state.stories.add(request.request_id, entry)
        plan = MigratePlan(step_id, source, start.target, tuple(moves))
        self._begin(Step(plan, start.requests, now))
        state.totals.num_migrations += 1
        state.totals.num_migrated_tokens += plan.num_tokens
        return Migrate(plan, start.reason)

    def decode(self, start: StartDecode, now: float) -> RunDecode:
        """Charge one slot on each request's master, and put the members to work."""
        state = self._state
        step_id = self.next_step()
        requests = tuple([request for request, _ in start.items])
        for holders in {request.holders for request in requests}:
            for instance in holders:
                state.instances[instance].owes_decode = False
        plan = DecodePlan(step_id, start.members, self._extend(start.items, step_id))
        for request in requests:
            request.step_id = step_id
        self._begin(Step(plan, requests, now))
        state.totals.num_decode_steps += 1
        state.totals.num_scale_ups += len(start.joined) > 0
        state.stories.begin_decode(
            requests,
            at_s=now,
            reason=start.reason,
            group=start.members,
            masters=plan.masters,
        )
        return RunDecode(plan, start.reason)

    def follow(self, step: Step, now: float) -> RunDecode:
        """Queue one more step of a decode group behind the one that it runs."""
        before = step.plan
        assert isinstance(before, DecodePlan), before
        assert step.follow is None, step
        step_id = self.next_step()
        masters = [item.master for item in before.items]
        items = self._extend(zip(step.requests, masters, strict=True), step_id)
        plan = DecodePlan(step_id, before.members, items, follows=before.step_id)
        step.follow = Step(plan, step.requests, now, num_before=step.num_before + 1)
        self._state.totals.num_decode_steps += 1
        self._state.totals.num_queued_ahead += 1
        reason = (
            f"decode {plural(len(items), 'request')} on {name_instances(before.members)} once "
            f"more{self._foretell(plan)}, queued behind step {before.step_id}, for nothing else "
            "wants the group"
        )
        return RunDecode(plan, reason)

    def _foretell(self, plan: DecodePlan) -> str:
        if self._sib is None:
            return ""
        kv_tokens = sum([item.position + 1 for item in plan.items])
        return describe_decode(self._sib, plan.dop, plan.masters, len(plan.items), kv_tokens)

    def next_step(self) -> int:
        """A number for a new step."""
        self._num_steps += 1
        return self._num_steps

    def _next_segment(self) -> int:
        self._num_segments += 1
        return self._num_segments

    def _begin(self, step: Step) -> None:
        state = self._state
        state.steps[step.step_id] = step
        for instance in step.members:
            assert state.instances[instance].idle, f"instance {instance} is not idle"
            state.instances[instance].step = step

    def _place(self, placed: Placed, members: tuple[int, ...], step_id: int) -> PrefillItem:
        request, num_tokens = placed.request, placed.num_tokens
        if request.phase is Phase.WAITING:
            self._leave_queue(request)
        assert all(i in members for i in request.holders), request
        assert 0 < num_tokens <= request.left_tokens, request
        segment = self._next_segment()
        item = PrefillItem(
            request_id=request.request_id,
            start=request.kv_tokens,
            num_tokens=num_tokens,
            segment=segment,
            keep=placed.keep,
            cached=request.segments,
            holders=request.holders,
            holder_tokens=self._held(request),
            samples=placed.is_last,
        )
        for instance, count in placed.keep:
            self._state.pool.allocate(segment, instance, count)
        request.segments = (*request.segments, segment)
        request.kv_tokens += num_tokens
        request.holders = tuple(sorted({*request.holders, *(i for i, _ in placed.keep)}))
        request.master = placed.master
        request.step_id = request.last_step_id = step_id
        self._state.tally.touch(request)
        return item

    def _held(self, request: Request) -> tuple[int, ...]:
        """Tokens of the request on each of its holders."""
        if not request.holders:
            return ()
        tokens_on = self._state.pool.tokens_on
        return tuple(sum(tokens_on(s, i) for s in request.segments) for i in request.holders)

    def _leave_queue(self, request: Request) -> None:
        self._state.waiting.remove(request.request_id)
        self._state.running[request.request_id] = request
        self._num_begun += 1
        request.run_order = self._num_begun
        request.move(Phase.PREFILL)
        head = next(iter(self._state.waiting), None)
        if head is not None and head.order < request.order:
            head.num_passed += 1

    def _extend(self, pairs: Iterable[tuple[Request, int]], step_id: int) -> tuple[DecodeItem, ...]:
        """One more token of each request, kept by its master."""
        tally, items, segments = self._state.tally, [], []
        for request, master in pairs:
            cached, holders = request.segments, request.holders
            segment = request.open_segment
            if segment is None:
                segment = request.open_segment = self._next_segment()
                request.segments = (*cached, segment)
            segments.append((segment, master))
            position = request.kv_tokens
            request.kv_tokens = position + 1
            is_known = master == request.master and master in holders
            if not is_known or request.wanted is not None:
                if master not in holders:
                    request.holders = tuple(sorted((*holders, master)))
                request.master, request.wanted = master, None
                tally.touch(request)
            request.last_step_id = step_id
            items.append(DecodeItem(request.request_id, position, master, segment, cached, holders))
        self._state.pool.extend(segments)
        return tuple(items)
