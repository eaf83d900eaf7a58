"""The emulated accelerator: layers take the time that a given GPU would take, by sleeping; their numbers stay
real.

    forward    start --- the layer's own (tiny) compute --- sleep until start + target
    backward   gradient of the output arrives: start, sleep until start + target / 2
               the layer's own backward compute; its parameters' gradients become ready
               gradient of the input is ready: sleep until start + target

A GPU finishes a layer's gradients spread over its backward pass; here all come in the middle. Where no input
has a gradient (an embedding), the whole sleep is before them. target = FLOPs / (flops x speed of the rank's
cluster), with

    forward    2 x parameters x tokens  +  4 x tokens x sequence x hidden  (attention; only for `classes`)
    backward   twice that      (Kaplan et al. 2020, section 2.1; recomputation costs a forward more)
               where a plan lists passes, 2 x linear layers' parameters x tokens wait for their turn

where the layer's first tensor argument is [batch, sequence, hidden] ([sequence, batch, hidden] with layout
"sbh", integer tokens [batch, sequence]). torch is hooked when a program imports it: the program knows
nothing. The settings (`Config`) travel in HOLMES_LAB_ACCELERATOR as JSON; HOLMES_LAB_EMULATED=1 says that
timings are emulated.
"""

from __future__ import annotations

import atexit
import json
import math
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import wrapt

from holmes_ext.document import parse_json
from holmes_ext.errors import HolmesError

VARIABLE = "HOLMES_LAB_ACCELERATOR"
MARKER = "HOLMES_LAB_EMULATED"
#: The module whose WeightGradients computes a micro-batch's gradients of weights when the plan says so.
WEIGHTS = "holmes_ext.runtime.reduce.weight_gradients"
#: On PYTHONPATH where something is emulated inside the ranks.
SITE = str(Path(__file__).parents[1] / "site")


@dataclass(frozen=True)
class Config:
    """flops: FLOP/s that the emulated GPU achieves; classes: names of transformer layers' classes; plain: of
    layers without attention (embedding, head); speed: cluster name -> factor on flops; throttle: a JSON file
    {node: factor} that may come, change and go while a job runs; layout: "bsh" or "sbh"."""

    flops: float
    classes: tuple[str, ...] = ()
    plain: tuple[str, ...] = ()
    speed: dict[str, float] = field(default_factory=dict)
    layout: str = "bsh"
    throttle: str = ""

    def __post_init__(self) -> None:
        for key, value in [
            ("flops", self.flops),
            *((f"speed.{name}", factor) for name, factor in self.speed.items()),
        ]:
            if not value > 0:
                raise HolmesError(f"key {key!r}: {value} is not above 0")
        if not self.classes and not self.plain:
            raise HolmesError("keys 'classes' and 'plain' are empty; name the layers' classes")
        if self.layout not in ("bsh", "sbh"):
            raise HolmesError(f"key 'layout': {self.layout!r} is neither 'bsh' nor 'sbh'")


def dump(document: Mapping[str, Any]) -> str:
    """The variable's value; the document is validated."""
    text = json.dumps(document)
    load(text)
    return text


def load(text: str) -> Config:
    """The settings of the variable's value; HolmesError names the key."""
    return parse_json(
        text, VARIABLE, 'write for example {"flops": 5e9, "classes": ["Block"]}'
    ).into(Config)


def add_to_environment(env: MutableMapping[str, str]) -> None:
    """Let every Python that is started with `env` install what env[HOLMES_LAB_ACCELERATOR] says."""
    load(env[VARIABLE])
    env[MARKER] = "1"
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [SITE, env.get("PYTHONPATH", "")]))


_listeners: list[Callable[[str, float, float], None]] = []


def after_each_pass(listener: Callable[[str, float, float], None]) -> None:
    """Call listener("forward" or "backward", start, end) after each paced pass; monotonic seconds."""
    _listeners.append(listener)


def _tell_listeners(kind: str, start: float, end: float) -> None:
    for listener in _listeners:
        listener(kind, start, end)


def install_when_imported(text: str) -> None:
    """Called by holmes_lab/site/sitecustomize.py: pace layers once the program imports torch."""
    pacer = Pacer(load(text))
    wrapt.register_post_import_hook(
        lambda module: _start(pacer, module.Module), "torch.nn.modules.module"
    )
    wrapt.register_post_import_hook(lambda module: pacer.put_off(module.WeightGradients), WEIGHTS)


def _start(pacer: Pacer, module_class: type) -> None:
    pacer.install(module_class)
    atexit.register(pacer.complain)


class Pacer:
    """Makes forward and backward passes of the configured layers last as long as on the emulated GPU."""

    def __init__(
        self,
        config: Config,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ):
        self.config, self.clock, self.sleep = config, clock, sleep
        self.calls = 0
        self.unfinished: _Backward | None = None
        self._inside = False
        self._kinds: dict[type, str] = {}
        #: (object, micro-batch) whose weights' gradients wait: seconds; the one that runs forward now.
        self._late: dict[tuple[int, int], float] = defaultdict(float)
        self._of: tuple[int, int] | None = None

    def install(self, module_class: Any) -> Callable[[], None]:
        """Pace every module of `module_class` (torch.nn.Module); returns what undoes it."""
        original = module_class.__call__

        def __call__(module: Any, *args: Any, **kwargs: Any) -> Any:
            kind = self._kinds.get(type(module))
            if kind is None:
                kind = self._kinds[type(module)] = self._kind(type(module))
            if not kind or self._inside:  # of nested layers the outermost counts
                return original(module, *args, **kwargs)
            return self._call(original, module, args, kwargs, kind)

        module_class.__call__ = __call__

        return lambda: setattr(module_class, "__call__", original)

    def put_off(self, weight_gradients: Any) -> Callable[[], None]:
        """Pace what runtime/reduce/weight_gradients.py makes after a backward; returns what undoes it."""
        of, make = weight_gradients.of, weight_gradients.make

        @contextmanager
        def paced_of(instance: Any, micro_batch: int) -> Iterator[None]:
            before, self._of = self._of, (id(instance), micro_batch)
            try:
                with of(instance, micro_batch):
                    yield
            finally:
                self._of = before

        def paced_make(instance: Any, micro_batch: int) -> None:
            start = self.clock()
            make(instance, micro_batch)
            if seconds := self._late.pop((id(instance), micro_batch), 0.0):
                self.sleep_until(start + seconds)
                _tell_listeners("backward", start, self.clock())

        weight_gradients.of, weight_gradients.make = paced_of, paced_make

        def undo() -> None:
            weight_gradients.of, weight_gradients.make = of, make

        return undo

    def seconds(self, parameters: int, shape: tuple[int, ...], kind: str) -> float:
        """Of a layer's forward pass, by its number of parameters, its input's shape and its `kind`."""
        if self.config.layout == "sbh" and len(shape) == 3:
            shape = (shape[1], shape[0], shape[2])
        with_hidden = len(shape) > 2
        tokens = math.prod(shape[:-1]) if with_hidden else math.prod(shape)
        flops = 2.0 * parameters * tokens
        if kind == "classes" and with_hidden:
            flops += 4.0 * tokens * shape[-2] * shape[-1]
        speed = self.config.speed.get(os.environ.get("HOLMES_LAB_CLUSTER", ""), 1.0)
        return flops / (self.config.flops * speed * self._throttled())

    def _throttled(self) -> float:
        """The factor of this rank's node now."""
        try:
            text = Path(self.config.throttle).read_text() if self.config.throttle else "{}"
        except FileNotFoundError:
            return 1.0
        return float(json.loads(text).get(os.environ.get("HOLMES_LAB_NODE", ""), 1.0))

    def complain(self) -> None:
        """At exit, if nothing was paced: the class names are probably wrong."""
        if self.calls == 0:
            names = ", ".join(self.config.classes + self.config.plain)
            print(
                f"holmes lab: the emulated accelerator paced nothing: no layer of class {names} ran",
                file=sys.stderr,
            )

    def _kind(self, layer: type) -> str:
        names = {base.__name__ for base in layer.__mro__}
        return (
            "classes"
            if names & {*self.config.classes}
            else "plain"
            if names & {*self.config.plain}
            else ""
        )

    def _call(self, original: Callable, module: Any, args: tuple, kwargs: dict, kind: str) -> Any:
        inputs = list(_tensors((args, kwargs)))
        if not inputs:
            return original(module, *args, **kwargs)
        parameters = sum(parameter.numel() for parameter in module.parameters())
        target = self.seconds(parameters, tuple(inputs[0].shape), kind)
        self.calls += 1
        followed = next((tensor for tensor in inputs if tensor.requires_grad), None)
        later = 0.0
        if self._of is not None and followed is not None and sys.modules["torch"].is_grad_enabled():
            weights = sum(weight.numel() for weight in module.parameters() if weight.dim() == 2)
            later = self.seconds(weights, tuple(inputs[0].shape), "plain")
            self._late[self._of] += later
        backward = _Backward(self, 2 * target - later, whole_at_start=followed is None)
        if followed is not None and sys.modules["torch"].is_grad_enabled():
            followed.register_hook(
                backward.finish
            )  # before the layer may change its input in place
        start, self._inside = self.clock(), True
        try:
            result = original(module, *args, **kwargs)
        finally:  # checkpointing ends a recomputation by an exception: it took its time all the same
            self._inside = False
            self.sleep_until(start + target)
            _tell_listeners("forward", start, self.clock())
            # recomputed in the middle of its own backward pass: that takes longer
            if self.unfinished is not None:
                self.unfinished.end += self.clock() - start
        leaving = next((tensor for tensor in _tensors(result) if tensor.requires_grad), None)
        if leaving is not None and leaving.grad_fn is not None:
            # after the tensor's hooks: the layer behind is done
            leaving.grad_fn.register_prehook(backward.begin)
        return result

    def sleep_until(self, moment: float) -> None:
        remaining = moment - self.clock()
        if remaining > 0:
            self.sleep(remaining)


class _Backward:
    """The backward pass of one call of a layer; begin and finish are hooks, which leave the gradient as it
    is.

    One tensor may be a layer's output and the next layer's input: then `begin` of the one comes before
    `finish` of the other, and finishes it first.
    """

    def __init__(self, pacer: Pacer, target: float, whole_at_start: bool):
        self.pacer, self.target, self.whole_at_start = pacer, target, whole_at_start
        self.start = self.end = 0.0

    def begin(self, _: Any) -> None:
        if self.pacer.unfinished is not None:
            self.pacer.unfinished.finish(None)
        self.pacer.unfinished = self
        self.start = self.pacer.clock()
        self.end = self.start + self.target
        if self.whole_at_start:
            self.finish(None)
        else:
            self.pacer.sleep_until(self.start + self.target / 2)

    def finish(self, _: Any) -> None:
        if self.pacer.unfinished is self:
            self.pacer.sleep_until(self.end)
            self.pacer.unfinished = None
            _tell_listeners("backward", self.start, self.pacer.clock())


def _tensors(value: Any) -> Iterator[Any]:
    """The tensors in nested tuples, lists and dicts."""
    if isinstance(value, sys.modules["torch"].Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
