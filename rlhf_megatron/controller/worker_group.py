"""WorkerGroup: how the loop talks to a role. `group.method(batch)` waits; `group.start("method", batch)` does not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from rlhf_megatron.controller import dispatch
from rlhf_megatron.controller.pools import ResourcePool
from rlhf_megatron.data.proto import DataProto
from rlhf_megatron.workers.base import TOKENS, Replica, Worker, methods_of


class Pending(Protocol):
    """A call on its way."""

    def done(self) -> bool: ...

    @property
    def span(self) -> tuple[float, float]:
        """Seconds of time.monotonic(), once it is done: when it could begin, the calls before it being answered, and
        when the last rank had answered it."""

    def wait(self) -> dict[int, Any]:
        """Results by pool rank, of the ranks whose result was wanted. Raises when the call failed."""


class Transport(Protocol):
    """How a call reaches the ranks of a pool."""

    def call(
        self, pool: ResourcePool, role: str, method: str, kwargs: dict[str, Any], rows: Mapping[int, DataProto],
        wanted: tuple[int, ...],
    ) -> Pending:
        """Call `method` on every rank of the pool. `rows`: by pool rank, for the entry ranks of replicas."""


# What is told of every call when its result is taken: pool, role, method, begin and end in seconds of time.monotonic().
Watcher = Callable[[str, str, str, float, float], None]


class Future:
    """The result of `WorkerGroup.start`."""

    def __init__(self, pending: Pending, finish: Callable[[dict[int, Any]], Any]) -> None:
        self._pending, self._finish = pending, finish
        self._result: list[Any] = []

    def done(self) -> bool:
        """Whether `result` would return (or raise) at once."""
        return self._pending.done()

    def result(self) -> Any:
        """Wait for the call and return its result; the same object every time."""
        if not self._result:
            self._result.append(self._finish(self._pending.wait()))
        return self._result[0]


class WorkerGroup:
    """All ranks of one role, seen from the loop.

    Declared methods of `worker_cls` are attributes: `actor.update(batch)`, `actor.save(directory=...)`. A method that
    splits rows takes the batch first and then keyword arguments; any other takes keyword arguments only.

    Raises:
        ValueError: the replicas that the role's layout gives do not cover the pool, each rank once.
    """

    def __init__(
        self, role: str, worker_cls: type[Worker], config: Any, pool: ResourcePool, transport: Transport
    ) -> None:
        self.role, self.pool = role, pool
        self._transport = transport
        self._watchers: list[Watcher] = []
        self._methods = methods_of(worker_cls)
        taken = sorted(set(self._methods) & {"role", "pool", "start", "methods", "watch"})
        if taken:
            raise ValueError(f"{worker_cls.__qualname__}.{taken[0]}: WorkerGroup has that name; rename the method")
        kinds = {spec.split for spec in self._methods.values() if spec.split is not None}
        self._replicas = {kind: _replicas(role, worker_cls, config, pool, kind) for kind in kinds}
        # How long responses will be is not known before "generate": its rows cost their prompts' tokens.
        self._row_costs = {kind: TOKENS if kind == "generate" else worker_cls.row_cost(role, config) for kind in kinds}

    def methods(self) -> list[str]:
        """Names of the methods that can be called."""
        return sorted(self._methods)

    def watch(self, watcher: Watcher) -> None:
        """Tell `watcher` of every call from now on."""
        self._watchers.append(watcher)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        methods = self.__dict__.get("_methods", {})
        if name not in methods:
            role = self.__dict__.get("role")
            raise AttributeError(f"role {role} has no method {name!r}; it declares {sorted(methods)}")
        return lambda *args, **kwargs: self.start(name, *args, **kwargs).result()

    def start(self, method: str, batch: DataProto | None = None, /, **kwargs: Any) -> Future:
        """Send a call and return at once. Calls to one pool run in the order in which they were started; calls to
        disjoint pools run at the same time. The batch must not be written to before the result is there.

        Raises:
            AttributeError: no such method. TypeError: a batch is missing, or given where none is taken.
            MissingField: the batch lacks a field that the method reads.
        """
        spec = self._methods.get(method)
        if spec is None:
            raise AttributeError(f"role {self.role} has no method {method!r}; it declares {self.methods()}")
        stage = f"{self.role}.{method}"
        if spec.split is None:
            if batch is not None:
                raise TypeError(f"{stage} does not split rows: it takes keyword arguments only")
            pending = self._transport.call(self.pool, self.role, method, kwargs, {}, (0,))
            return self._future(method, pending, lambda results: results[0])
        if not isinstance(batch, DataProto):
            raise TypeError(f"{stage} splits rows: its first argument must be a DataProto, not {type(batch).__name__}")
        batch.require(spec.reads, stage)
        fields = list(dict.fromkeys([*spec.reads, *(name for name in spec.optional if name in batch)]))
        replicas = self._replicas[spec.split]
        split = dispatch.split(batch.select(fields), len(replicas), self._row_costs[spec.split])
        rows = {replica.entry: part for replica, part in zip(replicas, split.parts, strict=True)}
        outputs = tuple(replica.output for replica in replicas)
        pending = self._transport.call(self.pool, self.role, method, kwargs, rows, outputs)
        return self._future(
            method, pending, lambda results: dispatch.merge([results[r] for r in outputs], split, spec, stage)
        )

    def _future(self, method: str, pending: Pending, finish: Callable[[dict[int, Any]], Any]) -> Future:
        def told(results: dict[int, Any]) -> Any:
            for watcher in self._watchers:
                watcher(self.pool.name, self.role, method, *pending.span)
            return finish(results)

        return Future(pending, told)


def _replicas(role: str, worker_cls: type[Worker], config: Any, pool: ResourcePool, kind: str) -> list[Replica]:
    replicas = worker_cls.replicas(role, config, pool.size, kind)
    covered = sorted(rank for replica in replicas for rank in replica.ranks)
    if covered != list(range(pool.size)):
        raise ValueError(f"{kind} replicas of {role} cover pool ranks {covered}, but pool {pool.name} has ranks "
                         f"0..{pool.size - 1}: every rank must be in exactly one replica")
    for replica in replicas:
        if replica.entry not in replica.ranks or replica.output not in replica.ranks:
            raise ValueError(f"a {kind} replica of {role} enters or leaves outside its ranks: {replica}")
    return replicas
