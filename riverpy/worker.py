"""Workers: the registry of the functions and worker classes that work each kind of job."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from datetime import timedelta
from functools import partial
from types import SimpleNamespace, UnionType
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    Generic,
    Literal,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
    overload,
)

import msgspec
from msgspec import UNSET, UnsetType

from riverpy._json_decoder import make_decoder
from riverpy._names import validate_kind
from riverpy._plugins import check_worker_middleware
from riverpy._process_functions import require_distinct_function_names, require_importable_function
from riverpy._pydantic_models import is_model_class, require_json_object_model
from riverpy.errors import ConfigError
from riverpy.job import Job
from riverpy.middleware import WorkerMiddleware

if TYPE_CHECKING:
    from typing import Self

    from riverpy.job_output import JobOutput

ArgsT = TypeVar("ArgsT")
# If a function has a wrong type, mypy's error shows the name of the type variable, but not its
# bound. So these names describe the expected function.
AsyncFunctionFromJobToOutput = TypeVar(
    "AsyncFunctionFromJobToOutput", bound="Callable[[Job[Any]], Awaitable[JobOutput]]"
)
PlainFunctionFromJobToOutput = TypeVar(
    "PlainFunctionFromJobToOutput", bound="Callable[[Job[Any]], JobOutput]"
)

FunctionT = TypeVar("FunctionT", bound="Callable[[Job[Any]], Any]")


class Worker(ABC, Generic[ArgsT]):
    """The base class of workers. A worker works the jobs of one kind, which is the kind of its args
    class: `class WelcomeWorker(Worker[Welcome])`.

    One object works all jobs of the kind, many at the same time. So do not store values of a single
    job in attributes.
    """

    kind: ClassVar[str | None] = None
    """The kind of the jobs. It is needed only if the args class has no `kind`."""

    @abstractmethod
    async def work(self, job: Job[ArgsT]) -> JobOutput:
        """Do the work of the job.

        If this method returns, the job is completed. The returned value is stored as the job's
        output, except if it is None or `job.record_output` was called. If this method raises
        JobCancel or JobSnooze, the job is cancelled or snoozed. If it raises another error, the
        attempt fails."""

    def timeout(self, job: Job[ArgsT]) -> timedelta | UnsetType | None:
        """Return how long the job may run. None: no limit. UNSET (the default): the client's
        timeout."""
        return UNSET

    def next_retry(self, job: Job[ArgsT]) -> timedelta | None:
        """Return how long the job waits after a failed attempt. None (the default): the client's
        retry policy decides."""
        return None

    def middleware(self, job: Job[Any]) -> Sequence[WorkerMiddleware]:
        """Return middleware for this attempt. It wraps the client's middleware, and runs before the
        args are decoded. Default: no middleware."""
        return ()


Executor = Literal["thread", "process"]


class RegisteredWorker(msgspec.Struct, frozen=True, kw_only=True):
    """A worker in the registry: the function and the settings for jobs of one kind."""

    kind: str
    aliases: tuple[str, ...]
    args_type: Any
    work: Callable[[Job[Any]], Any]
    decode_args: Callable[[str], Any]
    timeout: timedelta | UnsetType | None = UNSET
    """The timeout of each job of the kind; UNSET: the client's timeout; None: no limit."""
    get_job_timeout: Callable[[Job[Any]], timedelta | UnsetType | None] | None = None
    """The method `timeout` of the worker, which is called for each job; None: the worker does not
    define it."""
    next_retry: Callable[[Job[Any]], timedelta | None] | None = None
    middleware: Callable[[Job[Any]], Sequence[WorkerMiddleware]] | None = None
    """The function that returns the worker's middleware for an attempt; None: the worker has no
    middleware."""
    executor: Executor | None = None

    def resolve_timeout(
        self, client_timeout: timedelta | None, job_timeout: timedelta | UnsetType | None = UNSET
    ) -> timedelta | None:
        """Return the timeout of a job; None: no timeout.

        Precedence: `job_timeout`, which the worker's method `timeout` returned for the job; then
        the timeout of the kind; then `client_timeout`, the timeout of the client.
        """
        if job_timeout is not UNSET:
            return job_timeout
        return client_timeout if self.timeout is UNSET else self.timeout


_REFUSED_RETURN_TYPES = (AsyncIterator, Awaitable, Iterator, AbstractSet)
"""Types that cannot be stored as JSON. A handler with such a return annotation is refused."""


class Workers:
    """A registry of workers. A client works the kinds of jobs that its registry contains."""

    def __init__(self) -> None:
        self._worker_by_kind: dict[str, RegisteredWorker] = {}

    def __len__(self) -> int:
        return len(self.list_registered_workers())

    def __iter__(self) -> Iterator[str]:
        return iter(self._worker_by_kind)

    def __contains__(self, kind: object) -> bool:
        return kind in self._worker_by_kind

    def get(self, kind: str) -> RegisteredWorker | None:
        """Return the worker that is registered for this kind or alias, or None."""
        return self._worker_by_kind.get(kind)

    def list_registered_workers(self) -> list[RegisteredWorker]:
        """Return each registered worker once, even if it has aliases, in the order of
        registration."""
        return [unit for kind, unit in self._worker_by_kind.items() if unit.kind == kind]

    def include(self, other: Workers, *, replace: bool = False) -> Self:
        """Register all workers of another registry. If one worker cannot be registered, register
        none of them. Workers that are added to `other` later are not included.

        Args:
            other: the other registry. It is not changed.
            replace: as for `job`.

        Raises:
            ConfigError: a kind is already registered, or `other` is not a registry.
        """
        if not isinstance(other, Workers):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(f"include takes a Workers registry, got {type(other).__name__}")
        before = dict(self._worker_by_kind)
        try:
            for unit in other.list_registered_workers():
                self._register(unit, replace=replace)
        except ConfigError:
            self._worker_by_kind = before
            raise
        return self

    def add(self, worker: Worker[Any], *, replace: bool = False) -> Self:
        """Register a worker object.

        Args:
            worker: the worker object.
            replace: as for `job`.

        Raises:
            ConfigError: `worker` is not a worker object; its `work` is not an `async def` that
                takes the job and returns a JSON value; JSON cannot be decoded into the args class;
                or the kind is missing, not allowed or already registered.
        """
        cls: Any = type(worker)
        if isinstance(worker, type):
            raise ConfigError(
                f"add takes a worker object, got the class {worker.__name__}: "
                f"workers.add({worker.__name__}())"
            )
        if not isinstance(worker, Worker):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(
                f"add takes an object of a class derived from Worker[YourArgs], got "
                f"{cls.__name__}: register a function with @workers.job"
            )
        if inspect.isasyncgenfunction(cls.work) or not inspect.iscoroutinefunction(cls.work):
            raise ConfigError(f"{cls.__name__}.work must be an `async def` without yield")
        _check_job_function_signature(worker.work, f"{cls.__name__}.work")
        args_type = _find_args_class(cls)
        self._register(
            RegisteredWorker(
                kind=_find_kind(args_type, worker.kind, cls.__name__),
                aliases=_find_kind_aliases(args_type),
                args_type=args_type,
                work=worker.work,
                decode_args=make_args_decoder(args_type, cls.__name__),
                get_job_timeout=worker.timeout if _has_override(cls, "timeout") else None,
                next_retry=worker.next_retry if _has_override(cls, "next_retry") else None,
                middleware=worker.middleware if _has_override(cls, "middleware") else None,
            ),
            replace=replace,
        )
        return self

    @overload
    def job(self, function: AsyncFunctionFromJobToOutput, /) -> AsyncFunctionFromJobToOutput: ...
    @overload
    def job(
        self,
        /,
        *,
        kind: str | None = None,
        timeout: timedelta | UnsetType | None = UNSET,
        next_retry: Callable[[Job[Any]], timedelta | None] | None = None,
        middleware: Sequence[WorkerMiddleware] = (),
        replace: bool = False,
    ) -> Callable[[AsyncFunctionFromJobToOutput], AsyncFunctionFromJobToOutput]: ...
    def job(
        self,
        function: AsyncFunctionFromJobToOutput | None = None,
        /,
        *,
        kind: str | None = None,
        timeout: timedelta | UnsetType | None = UNSET,
        next_retry: Callable[[Job[Any]], timedelta | None] | None = None,
        middleware: Sequence[WorkerMiddleware] = (),
        replace: bool = False,
    ) -> (
        AsyncFunctionFromJobToOutput
        | Callable[[AsyncFunctionFromJobToOutput], AsyncFunctionFromJobToOutput]
    ):
        """Register an `async def` whose only parameter is annotated `Job[...]`. The function itself
        is not changed.

        Args:
            function: the function, if the decorator is used without parentheses.
            kind: the kind of the jobs. It is needed only if the args class has no `kind`.
            timeout: how long a job may run; None: no limit. Default: the client's timeout.
            next_retry: a function that returns how long a job waits after a failed attempt, as
                `Worker.next_retry`. Default: the client's retry policy decides.
            middleware: middleware for each attempt. It wraps the client's middleware. Default none.
            replace: whether to replace a registered worker of the same kind, for example when a
                cell of a notebook runs again. A running client keeps its old worker. Default False:
                a kind that is already registered raises ConfigError.

        Raises:
            ConfigError: the function is not a coroutine function, or has no usable annotation, more
                than one parameter or a return value without a JSON form; JSON cannot be decoded
                into the args class; or the kind is already registered or not allowed.
        """

        register = self._make_decorator(
            "job", None, kind, timeout, next_retry, middleware, replace=replace
        )
        return register if function is None else register(function)

    @overload
    def blocking_job(
        self, function: PlainFunctionFromJobToOutput, /
    ) -> PlainFunctionFromJobToOutput: ...
    @overload
    def blocking_job(
        self,
        /,
        *,
        executor: Executor = "thread",
        kind: str | None = None,
        timeout: timedelta | UnsetType | None = UNSET,
        next_retry: Callable[[Job[Any]], timedelta | None] | None = None,
        middleware: Sequence[WorkerMiddleware] = (),
        replace: bool = False,
    ) -> Callable[[PlainFunctionFromJobToOutput], PlainFunctionFromJobToOutput]: ...
    def blocking_job(
        self,
        function: PlainFunctionFromJobToOutput | None = None,
        /,
        *,
        executor: Executor = "thread",
        kind: str | None = None,
        timeout: timedelta | UnsetType | None = UNSET,
        next_retry: Callable[[Job[Any]], timedelta | None] | None = None,
        middleware: Sequence[WorkerMiddleware] = (),
        replace: bool = False,
    ) -> (
        PlainFunctionFromJobToOutput
        | Callable[[PlainFunctionFromJobToOutput], PlainFunctionFromJobToOutput]
    ):
        """Register a plain function. Each job runs in a thread or in a child process, and uses one
        slot of its queue.

        A thread cannot be stopped: after a timeout or a cancel the function keeps running, and
        keeps its slot, until it returns. A child process is killed. It imports the function and its
        args class by name, so both must be at the top level of a module, and the args must be
        picklable.

        Args:
            function: the function, if the decorator is used without parentheses.
            executor: `thread` (default) or `process`.
            kind, timeout, next_retry, middleware, replace: as `job`.

        Raises:
            ConfigError: as `job`; or the function is a coroutine function. With `process` also if
                the function is a lambda, if it or its args class is defined inside a function or in
                an interactive session, or if another function has the same name.
        """
        if executor not in get_args(Executor):
            raise ConfigError(f"executor must be 'thread' or 'process', got {executor!r}")

        register = self._make_decorator(
            "blocking_job", executor, kind, timeout, next_retry, middleware, replace=replace
        )
        return register if function is None else register(function)

    def _make_decorator(
        self,
        decorator_name: str,
        executor: Executor | None,
        kind: str | None,
        timeout: timedelta | UnsetType | None,
        next_retry: Callable[[Job[Any]], timedelta | None] | None,
        middleware: Sequence[WorkerMiddleware],
        *,
        replace: bool,
    ) -> Callable[[FunctionT], FunctionT]:
        """Return the decorator that registers a function as a worker.

        `decorator_name` is its name for error texts. With `executor` None, the function must be an
        `async def`."""

        def register(function: FunctionT) -> FunctionT:
            _check_is_function(function, decorator_name)
            name, is_generator = _get_function_name(function), inspect.isasyncgenfunction(function)
            is_async = inspect.iscoroutinefunction(function)
            if executor is None and (is_generator or not is_async):
                raise ConfigError(
                    f"{name} must be an `async def` without yield; "
                    "for a plain function use blocking_job"
                )
            if executor is not None and (
                is_async or is_generator or inspect.isgeneratorfunction(function)
            ):
                raise ConfigError(f"{name} must be a plain function; for an `async def` use job")
            args_type = _find_annotated_args_type(function)
            check_worker_middleware(name, middleware)
            if executor == "process":
                require_importable_function(function, args_type)
            middleware_of_kind = tuple(middleware)
            self._register(
                RegisteredWorker(
                    kind=_find_kind(args_type, kind, name),
                    aliases=_find_kind_aliases(args_type),
                    args_type=args_type,
                    work=function,
                    decode_args=make_args_decoder(args_type, name),
                    timeout=timeout,
                    next_retry=next_retry,
                    middleware=(lambda job: middleware_of_kind) if middleware_of_kind else None,
                    executor=executor,
                ),
                replace=replace,
            )
            return function

        return register

    def _register(self, worker: RegisteredWorker, *, replace: bool) -> None:
        check_timeout(worker.kind, worker.timeout)
        if worker.next_retry is not None and not callable(worker.next_retry):
            raise ConfigError(
                f"the next_retry of job kind {worker.kind!r} must be a function that takes the job,"
                f" got {worker.next_retry!r}"
            )
        if worker.executor == "process":
            for other in self.list_registered_workers():
                if other.executor == "process" and other.kind != worker.kind:
                    require_distinct_function_names(worker.work, other.work)
        names = (worker.kind, *worker.aliases)
        for name in names:
            registered = self._worker_by_kind.get(name)
            if registered is not None and not (replace and registered.kind == worker.kind):
                raise ConfigError(
                    f"two workers for job kind {name!r}: a kind has one worker; replace=True "
                    "replaces the worker of the same kind"
                )
        self._worker_by_kind = {
            name: one for name, one in self._worker_by_kind.items() if one.kind != worker.kind
        }
        self._worker_by_kind.update(dict.fromkeys(names, worker))


def check_timeout(kind: str, timeout: object) -> None:
    """Raise ConfigError if the timeout is not None, UNSET or a timedelta above zero."""
    if timeout is None or timeout is UNSET:
        return
    if not isinstance(timeout, timedelta) or timeout <= timedelta(0):
        raise ConfigError(
            f"the timeout of job kind {kind!r} must be a timedelta above zero, or None for no "
            f"timeout, got {timeout!r}"
        )


def _check_is_function(function: object, decorator_name: str) -> None:
    """Raise ConfigError if the decorated object is not a function. This happens, for example, if an
    option is passed to the decorator without its name."""
    if isinstance(function, type) or not callable(function):
        raise ConfigError(
            f"{decorator_name} takes a function, got {function!r}: give options by name, as in "
            f"@workers.{decorator_name}(kind=…), and register a worker class with workers.add"
        )


def _check_job_function_signature(function: Callable[[Job[Any]], Any], function_name: str) -> None:
    """Raise ConfigError if the function cannot be called with the job as its only argument, or if
    its return annotation is a type that cannot be stored as JSON."""
    signature = inspect.signature(function)
    try:
        signature.bind(None)
    except TypeError as error:
        raise ConfigError(
            f"{function_name} is called with the job alone ({error}): it must take one parameter, "
            f"as in {function_name.rpartition('.')[2]}(job: Job[YourArgs])"
        ) from None
    returned = _find_refused_return_type(function)
    if returned is not None:
        raise ConfigError(
            f"{function_name} returns {returned}, which has no JSON form, so it cannot be stored "
            "as the output of the job: return None, a JSON value, a Struct, a dataclass or a "
            "pydantic model"
        )


def _find_refused_return_type(function: Callable[..., Any]) -> str | None:
    """Return the name of the type in the return annotation if it cannot be stored as JSON.
    Otherwise return None.

    An annotation that cannot be resolved is not checked, because its type may be imported only for
    type checkers."""
    with suppress(Exception):
        hint = _resolve_annotation(function, "return")
        for one in (hint, *get_args(hint)) if get_origin(hint) in {Union, UnionType} else (hint,):
            origin = get_origin(one) or one
            if isinstance(origin, type) and issubclass(origin, _REFUSED_RETURN_TYPES):
                return inspect.formatannotation(one)
    return None


def _has_override(worker_class: type[Any], method_name: str) -> bool:
    return getattr(worker_class, method_name) is not getattr(Worker, method_name)


def _get_function_name(function: Callable[..., Any]) -> str:
    function = _unwrap_partial(function)
    return getattr(function, "__qualname__", repr(function))


def _unwrap_partial(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function inside a `functools.partial`. Return any other function unchanged."""
    while isinstance(function, partial):
        function = function.func
    return function


def _find_kind(args_type: Any, explicit_kind: str | None, owner_name: str) -> str:
    """Return `explicit_kind` or, if it is None, the kind of the args class, and check the kind."""
    kind = explicit_kind if explicit_kind is not None else getattr(args_type, "kind", None)
    if explicit_kind is not None:
        validate_kind(explicit_kind)
    if not isinstance(kind, str):
        raise ConfigError(
            f'{owner_name} has no kind: give its args class `kind: ClassVar[str] = "…"`, or give '
            "`kind=` at its registration"
        )
    validate_kind(kind)
    return kind


def _find_kind_aliases(args_type: Any) -> tuple[str, ...]:
    aliases: Any = getattr(args_type, "kind_aliases", ())
    if isinstance(aliases, str) or not isinstance(aliases, Iterable):
        raise ConfigError(f'kind_aliases must be a tuple of kinds, as ("old",), got {aliases!r}')
    names = tuple(dict.fromkeys(cast("Iterable[str]", aliases)))
    for name in names:
        validate_kind(name)
    return names


def _find_args_class(worker_class: type[Worker[Any]]) -> Any:
    for base in worker_class.__mro__:
        for generic in getattr(base, "__orig_bases__", ()):
            origin = get_origin(generic)
            if isinstance(origin, type) and issubclass(origin, Worker):
                (parameter,) = get_args(generic)
                if not isinstance(parameter, TypeVar):
                    return parameter
    raise ConfigError(f"{worker_class.__name__} has no args class: derive it from Worker[YourArgs]")


def _resolve_annotation(function: Callable[..., Any], name: str) -> Any:
    """Return one annotation of a function as a type, or None if there is no annotation.

    Other annotations are not resolved, because their types may be imported only for type
    checkers."""
    plain = _unwrap_partial(function)
    annotations = getattr(plain, "__annotations__", {})
    if name not in annotations:
        return None
    holder = SimpleNamespace(__annotations__={name: annotations[name]})
    names = getattr(inspect.unwrap(plain), "__globals__", None)
    return get_type_hints(holder, globalns=names)[name]


def _find_annotated_args_type(function: Callable[..., Any]) -> Any:
    name = _get_function_name(function)
    parameters = list(inspect.signature(function).parameters)
    try:
        hint = _resolve_annotation(function, parameters[0]) if parameters else None
    except (NameError, TypeError) as error:
        raise ConfigError(
            f"the annotation of {name} cannot be resolved ({error}): its args class must be "
            "importable at run time"
        ) from error
    _check_job_function_signature(function, name)
    if hint is Job:
        return Any
    if not (isinstance(origin := get_origin(hint), type) and issubclass(origin, Job)):
        found = "no annotation" if hint is None else inspect.formatannotation(hint)
        raise ConfigError(
            f"the parameter of {name} must be annotated Job[YourArgs], as in "
            f"{name.rpartition('.')[2]}({parameters[0]}: riverpy.Job[Welcome]), got {found}"
        )
    return get_args(hint)[0]


def make_args_decoder(args_type: Any, owner_name: str) -> Callable[[str], Any]:
    """Return a function that decodes JSON text into args of the type `args_type`. `owner_name` is
    the name of the worker's function or class, for error texts.

    Raises:
        ConfigError: JSON cannot be decoded into this type.
    """
    described = f"{inspect.formatannotation(args_type)}, the args of {owner_name},"
    if isinstance(args_type, type) and issubclass(args_type, dict):
        make = cast("Callable[[dict[str, Any]], Any]", args_type)
        plain = msgspec.json.Decoder(dict[str, Any])
        return lambda text: make(plain.decode(text))
    try:
        args_class = cast("type[Any]", args_type)
        decode = make_decoder(args_class)
        if is_model_class(args_class):
            require_json_object_model(args_class)
    except NameError as error:
        raise ConfigError(
            f"{described} cannot be decoded: its annotations cannot be resolved ({error}): import "
            "their types at run time, not only under TYPE_CHECKING"
        ) from None
    except TypeError as error:
        raise ConfigError(f"{described} cannot be decoded: {error}") from None
    return decode
