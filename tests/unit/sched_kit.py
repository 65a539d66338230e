"""SIBs with round numbers and a driver in virtual time, for the scheduler's tests."""

from heapq import heappop, heappush

from loongd.sched.events import (
    Arrived,
    Cancelled,
    Emit,
    Fail,
    Finish,
    FreeSegments,
    InstanceJoined,
    Migrate,
    RunDecode,
    RunPrefill,
    StepDone,
)
from loongd.sched.plan import DecodePlan, MigratePlan, PrefillPlan
from loongd.sched.policies import make_policy
from loongd.sched.policy import Limits
from loongd.sched.scheduler import Scheduler
from loongd.sched.sib import Coefficients, DecodeCoefficients, Profile, Sib
from loongd.sched.sib_profile import DecodeFit, MigrateFit, PrefillFit


def make_sib(
    *,
    token_s=0.001,
    square_s=0.0,
    fixed_s=0.01,
    per_member_s=0.002,
    decode_s=0.01,
    kv_token_s=1e-6,
    move_token_s=1e-6,
    max_dop=8,
    compute_bound_batch=128,
    over_s=1e-4,
    least_s=0.0,
):
    """A prefill takes fixed + token * new / dop, or `least_s` if that is more; a decode step
    fixed + kv_token * kv / dop."""
    dops = range(1, max_dop + 1)
    big = 1 << 40
    profile = Profile(
        model="test",
        shape="test",
        device="test",
        tp=1,
        date="",
        source="round numbers",
        measured=True,
        prefill=[
            PrefillFit(
                dop=dop,
                coefficients=Coefficients(
                    alpha_s=fixed_s + per_member_s * (dop - 1),
                    beta_s=token_s / dop,
                    gamma_s=square_s / dop,
                    floor_s=least_s,
                ),
                max_tokens=big,
                max_square=big,
                max_items=big,
            )
            for dop in dops
        ],
        decode=[
            DecodeFit(
                dop=dop,
                num_masters=masters,
                coefficients=DecodeCoefficients(
                    alpha_s=decode_s + per_member_s * (dop - 1),
                    request_s=0.0,
                    kv_token_s=kv_token_s,
                    over_s=over_s,
                    knee=compute_bound_batch,
                ),
                max_batch=big,
                max_kv_tokens=big,
            )
            for dop in dops
            for masters in range(1, dop + 1)
        ],
        migrate=MigrateFit(alpha_s=0.001, token_s=move_token_s),
        compute_bound_batch=compute_bound_batch,
        kv_bytes_per_token=1,
        link_bytes_per_s=1e9,
    )
    return Sib(profile)


class VirtualTime:
    """Drives a scheduler with step times from its SIB; keeps what happened.

    `policy` is a name, or a policy that has none.

    Attributes:
        plans: (start, end, plan) of every step, in order of start.
        tokens: times of each request's tokens.
    """

    def __init__(self, *slots, policy="loongserve", sib=None, **limits):
        self.sib = sib or make_sib()
        policy = make_policy(policy, self.sib) if isinstance(policy, str) else policy
        self.scheduler = Scheduler(policy, Limits(**limits))
        self.now = 0.0
        self.ends = []
        self.plans = []
        self.reasons = []
        self.tokens = {}
        self.arrived = {}
        self.done = {}
        self.lines = []
        for instance, count in enumerate(slots):
            self.handle(InstanceJoined(0.0, instance, count))

    def arrive(self, request_id, prompt, max_tokens=10, *, at=None, reserve=None):
        if at is not None:
            self.run(until=at)
            self.now = at
        self.arrived[request_id] = self.now
        self.tokens[request_id] = []
        reserve = max_tokens if reserve is None else reserve
        return self.handle(Arrived(self.now, request_id, prompt, max_tokens, reserve))

    def cancel(self, request_id):
        return self.handle(Cancelled(self.now, request_id, "client"))

    def run(self, until=float("inf")):
        """Let steps end until `until`, or until nothing runs."""
        while self.ends and self.ends[0][0] <= until:
            self.step()
        return self

    def step(self):
        """Let the next step end."""
        self.now, _, event = heappop(self.ends)
        self.handle(event)

    def request(self, request_id):
        """The scheduler's own state of a request that waits or runs."""
        return self.scheduler._state.find(request_id)

    def handle(self, event):
        actions = self.scheduler.handle(event)
        self.scheduler.check()
        self.lines.append(f"{self.now:8.3f}  {describe(event)}")
        for action in actions:
            self.lines.append(f"              {describe(action)}")
            if isinstance(action, Emit):
                self.tokens[action.request_id].append(self.now)
            elif isinstance(action, Finish | Fail):
                self.done[action.request_id] = action
            elif isinstance(action, RunPrefill | RunDecode | Migrate):
                self.begin(action)
        return actions

    def begin(self, action):
        plan = action.plan
        if isinstance(plan, PrefillPlan):
            took_s = self.sib.prefill_s(plan.dop, [(i.start, i.num_tokens) for i in plan.items])
            took_s *= plan.share
            tokens = tuple((i.request_id, 1) for i in plan.items if i.samples and not plan.pauses)
        elif isinstance(plan, DecodePlan):
            took_s = self.sib.decode_s(
                dop=plan.dop,
                num_masters=len(plan.masters),
                batch=len(plan.items),
                kv_tokens=sum(i.position + 1 for i in plan.items),
            )
            tokens = tuple((i.request_id, 1) for i in plan.items)
        else:
            took_s, tokens = self.sib.migrate_s(plan.num_tokens), ()
        end_s = self.now + took_s
        self.plans.append((self.now, end_s, plan))
        self.reasons.append(action.reason)
        heappush(self.ends, (end_s, plan.step_id, StepDone(end_s, plan.step_id, took_s, tokens)))

    def ttft_s(self, request_id):
        return self.tokens[request_id][0] - self.arrived[request_id]

    def prefills(self, request_id):
        """(start, end, plan, item) of each chunk of a request."""
        return [
            (start_s, end_s, plan, item)
            for start_s, end_s, plan in self.plans
            if isinstance(plan, PrefillPlan)
            for item in plan.items
            if item.request_id == request_id
        ]

    def decodes(self, request_id):
        return [
            plan
            for _, _, plan in self.plans
            if isinstance(plan, DecodePlan)
            and any(item.request_id == request_id for item in plan.items)
        ]

    def moves(self):
        return [plan for _, _, plan in self.plans if isinstance(plan, MigratePlan)]


def describe(what):  # noqa: PLR0911 - one line for each kind
    """One line for an event or action, for golden traces."""
    match what:
        case InstanceJoined(_, instance, slots):
            return f"instance {instance} joins with {slots} slots"
        case Arrived():
            return f"{what.request_id} arrives: {what.prompt_tokens} + {what.max_tokens} tokens"
        case StepDone():
            return f"step {what.step_id} is done"
        case Cancelled(_, request_id, cause):
            return f"{request_id} is cancelled: {cause}"
        case RunPrefill(plan, reason) | RunDecode(plan, reason) | Migrate(plan, reason):
            return f"step {plan.step_id} on {list(plan.members)}: {reason}"
        case Emit(request_id, _):
            return f"token for {request_id}"
        case Finish(request_id, how):
            return f"{request_id} ends: {how}"
        case Fail(request_id, message, _, _):
            return f"{request_id} fails: {message}"
        case FreeSegments():
            return what.reason
    return str(what)
