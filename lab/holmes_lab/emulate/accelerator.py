"""Emulated accelerator: layers sleep so that they take as long as on a given GPU, and compute real numbers.

The passes of a layer:

    forward     The layer computes, and then sleeps until start + target.
    backward    It starts when the gradient of the output arrives. The layer sleeps until start + target / 2,
                and computes; the gradients of its parameters become ready. When the gradient of the input is
                ready, it sleeps until start + target.

A GPU finishes the gradients of a layer spread over its backward pass. Here all of them come in the middle. If
no input has a gradient (as in an embedding), the whole sleep is before them.

The target time is FLOP / (`flops` x speed of the rank's cluster), with the following FLOP:

    forward     2 x parameters x tokens + 4 x tokens x sequence x hidden. The second term is that of
                attention, and counts only for layers in `classes`.
    backward    twice that (Kaplan et al. 2020, section 2.1). Recomputation costs a forward pass more.

A pipeline schedule may compute the gradients of weights later than the gradients of activations, to
fill idle times (runtime/reduce/weight_gradients.py). The backward pass then takes 2 x parameters of
linear layers x tokens FLOP less, and computing the delayed gradients takes these FLOP.

The first tensor argument of a layer is [batch, sequence, hidden], or [sequence, batch, hidden] with the
layout "sbh", or integer tokens [batch, sequence].

torch is patched when a program imports it, so that programs need no change. The environment variable
HOLMES_LAB_ACCELERATOR has the settings (`Config`) as JSON, and HOLMES_LAB_EMULATED=1 marks jobs with emulated
timings.
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
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

import wrapt

from holmes_ext.document import parse_json
from holmes_ext.errors import HolmesError

VARIABLE = "HOLMES_LAB_ACCELERATOR"
MARKER = "HOLMES_LAB_EMULATED"
_HIDDEN_DIMENSIONS = 3  # of a layer's input: [batch, sequence, hidden]
_MATRIX_DIMENSIONS = 2  # of the weights of linear layers
#: Module of the class WeightGradients, by which pipeline schedules delay gradients of weights.
WEIGHTS = "holmes_ext.runtime.reduce.weight_gradients"
#: Folder with sitecustomize.py, for PYTHONPATH of ranks with emulated hardware.
SITECUSTOMIZE_FOLDER = str(Path(__file__).parents[1] / "site")


@dataclass(frozen=True)
class Config:
    """Settings of the emulated accelerator."""

    flops: float  # FLOP/s that the GPU achieves
    classes: tuple[str, ...] = ()  # names of the classes of transformer layers
    plain: tuple[str, ...] = ()  # the same for layers without attention, such as the output layer
    speed: dict[str, float] = field(default_factory=dict)  # cluster -> factor of `flops`
    #: Order of the dimensions of a layer's input: "bsh" (batch, sequence, hidden) or "sbh".
    layout: str = "bsh"
    #: JSON file with node -> further factor. It may appear, change and disappear while a job runs.
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
    """Return the value of HOLMES_LAB_ACCELERATOR for some settings.

    Raises:
        HolmesError: A setting is not valid. The message names its key.
    """
    text = json.dumps(document)
    load(text)
    return text


def load(text: str) -> Config:
    """Return the settings in the value of HOLMES_LAB_ACCELERATOR.

    Raises:
        HolmesError: The value is not valid. The message names the key.
    """
    return parse_json(
        text, VARIABLE, 'write for example {"flops": 5e9, "classes": ["Block"]}'
    ).into(Config)


def add_to_environment(env: MutableMapping[str, str]) -> None:
    """Change an environment so that each Python in it installs the accelerator.

    Args:
        env: Environment of a job, with HOLMES_LAB_ACCELERATOR. It is changed in place.
    """
    load(env[VARIABLE])
    env[MARKER] = "1"
    env["PYTHONPATH"] = os.pathsep.join(
        filter(None, [SITECUSTOMIZE_FOLDER, env.get("PYTHONPATH", "")])
    )


_listeners: list[Callable[[str, float, float], None]] = []


def after_each_pass(listener: Callable[[str, float, float], None]) -> None:
    """Register a function that is called after each emulated pass.

    Args:
        listener: Called as listener("forward" or "backward", start, end), with times of time.monotonic().
    """
    _listeners.append(listener)


def _call_listeners(kind: str, start: float, end: float) -> None:
    """Call the functions that record the times of emulated passes (emulate/trace.py)."""
    for listener in _listeners:
        listener(kind, start, end)


def install_when_imported(text: str) -> None:
    """Slow the program's layers down to the speed of the emulated GPU, as soon as it imports torch.

    Pipeline schedules may compute gradients of weights later than the rest of a backward pass, with holmes's
    class WeightGradients. If the program imports the class, these computations are slowed down, too.

    Args:
        text: Value of HOLMES_LAB_ACCELERATOR: the settings (`Config`) as JSON.
    """
    pacer = Pacer(load(text))
    wrapt.register_post_import_hook(
        lambda module: _start(pacer, module.Module), "torch.nn.modules.module"
    )
    wrapt.register_post_import_hook(
        lambda module: pacer.pace_delayed_gradients(module.WeightGradients), WEIGHTS
    )


def _start(pacer: Pacer, module_class: type) -> None:
    pacer.install(module_class)
    atexit.register(pacer.warn_if_unused)


class DelayedGradients(NamedTuple):
    """Gradients of weights for one micro-batch that are computed later than the rest of its backward pass."""

    instance: int  # id() of the object of holmes's class WeightGradients that computes them
    micro_batch: int


class _Role(Enum):
    """How the emulation treats calls of one class of modules: slowed down, or left as they are.

    Calls of an emulated layer compute, and then sleep until the time computed from its FLOP is
    over. Attention adds FLOP. Other modules run unchanged.
    """

    WITH_ATTENTION = "layer with attention"  # its name is in Config.classes
    WITHOUT_ATTENTION = "layer without attention"  # its name is in Config.plain
    NOT_EMULATED = "other module"  # it runs as fast as this machine does


class Pacer:
    """Makes forward and backward passes of the configured layers last as long as on the emulated GPU.

    The layers compute, and then sleep until the emulated time of the pass is over.
    """

    def __init__(
        self,
        config: Config,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ):
        """Prepare to slow layers down. install() makes it effective.

        Args:
            config: Speed of the emulated GPU, and the names of the classes of layers.
            clock: Returns the time in seconds.
            sleep: Sleeps for some seconds.
        """
        self.config, self.clock, self.sleep = config, clock, sleep
        self.calls = 0  # forward passes that were emulated
        self.unfinished: _Backward | None = None  # the backward pass that has begun and not ended
        self._inside = False  # whether a configured layer runs forward now
        self._roles: dict[type, _Role] = {}  # class of a module -> its role in the emulation
        # A pipeline schedule may compute gradients of weights later than the rest of a backward
        # pass. _call() fills this while a layer runs forward, and paced_make() empties it.
        #: Delayed gradients of a micro-batch -> emulated seconds that their computation will take.
        self._delayed_s: dict[DelayedGradients, float] = defaultdict(float)
        #: Key in `_delayed_s` of the layers that run forward now. None: the gradients of their
        #: weights are computed in the backward pass, as usual.
        self._delayed_key: DelayedGradients | None = None

    def install(self, module_class: Any) -> Callable[[], None]:
        """Patch torch.nn.Module, so that calls of layers take as long as on the emulated GPU.

        Config.classes and Config.plain name the classes of these layers. A call computes, and then
        sleeps until the forward time computed from the layer's FLOP is over. Autograd hooks do the
        same for the backward pass. Other modules run unchanged, and so do layers inside another
        such layer.

        Args:
            module_class: torch.nn.Module. The caller passes it, because this file imports no torch.

        Returns:
            A function that removes the patch.
        """
        original = module_class.__call__

        def emulated_call(module: Any, *args: Any, **kwargs: Any) -> Any:
            role = self._roles.get(type(module))
            if role is None:
                role = self._roles[type(module)] = self._role_of(type(module))
            # Of nested layers, only the outermost is emulated.
            if role is _Role.NOT_EMULATED or self._inside:
                return original(module, *args, **kwargs)
            has_attention = role is _Role.WITH_ATTENTION
            return self._call(original, module, args, kwargs, has_attention)

        module_class.__call__ = emulated_call
        return lambda: setattr(module_class, "__call__", original)

    def pace_delayed_gradients(self, weight_gradients: Any) -> Callable[[], None]:
        """Make the delayed computation of weight gradients take as long as on the emulated GPU.

        A pipeline schedule may compute weight gradients after the backward pass, to fill idle times. It uses
        two methods of holmes's class WeightGradients for this. The patched methods move the time of these
        gradients from the backward pass to the call of make():

            of(micro_batch)      context manager around a forward pass with delayed weight
                                 gradients. The patch notes the micro-batch in self._delayed_key. Each
                                 call of a layer in this pass then adds the emulated seconds of
                                 its weight gradients to self._delayed_s[micro-batch].
            make(micro_batch)    computes these gradients. The patch takes the sum of the seconds
                                 out of self._delayed_s, and sleeps until the call has lasted that
                                 long. Traces show the call as a backward pass.

        Args:
            weight_gradients: The class WeightGradients (runtime/reduce/weight_gradients.py).

        Returns:
            A function that removes the patch.
        """
        of, make = weight_gradients.of, weight_gradients.make

        @contextmanager
        def paced_of(instance: Any, micro_batch: int) -> Iterator[None]:
            before = self._delayed_key
            self._delayed_key = DelayedGradients(id(instance), micro_batch)
            try:
                with of(instance, micro_batch):
                    yield
            finally:
                self._delayed_key = before

        def paced_make(instance: Any, micro_batch: int) -> None:
            start = self.clock()
            make(instance, micro_batch)
            delayed = DelayedGradients(id(instance), micro_batch)
            seconds = self._delayed_s.pop(delayed, 0.0)
            if seconds > 0:
                self.sleep_until(start + seconds)
                _call_listeners("backward", start, self.clock())

        weight_gradients.of, weight_gradients.make = paced_of, paced_make

        def undo() -> None:
            weight_gradients.of, weight_gradients.make = of, make

        return undo

    def seconds(self, parameters: int, shape: tuple[int, ...], has_attention: bool) -> float:
        """Return the seconds of the forward pass of a layer on the emulated GPU.

        Args:
            parameters: Number of parameters of the layer.
            shape: Shape of its input: [batch, sequence, hidden] ([sequence, batch, hidden] with the layout
                "sbh"), or [batch, sequence] for integer tokens.
            has_attention: Whether the layer computes attention, besides products with its parameters.
        """
        has_hidden = len(shape) >= _HIDDEN_DIMENSIONS  # the input is no integer tokens
        if has_hidden:
            hidden = shape[-1]
            # With "sbh", the first of three dimensions is the sequence.
            is_sequence_first = self.config.layout == "sbh" and len(shape) == _HIDDEN_DIMENSIONS
            sequence = shape[0] if is_sequence_first else shape[-2]
            tokens = math.prod(shape[:-1])
        else:
            tokens = math.prod(shape)
        flops = 2.0 * parameters * tokens  # a multiplication and an addition for each parameter
        if has_attention and has_hidden:
            # Attention: scores and weighted sum of the values, with 2 x sequence x hidden FLOP each
            # for a token.
            flops += 4.0 * tokens * sequence * hidden
        cluster = os.environ.get("HOLMES_LAB_CLUSTER", "")  # the lab sets it for each rank
        # Clusters that the settings do not name have GPUs of the speed `config.flops`.
        cluster_speed = self.config.speed.get(cluster, 1.0)
        # _node_speed() is 1.0, unless a test slows this node down while the job runs.
        return flops / (self.config.flops * cluster_speed * self._node_speed())

    def _node_speed(self) -> float:
        """Return the present factor of this node's speed, 1.0 by default.

        It is read anew for each pass from the JSON file {node: factor} that the setting `throttle`
        names, so that a test can slow a node down while the job runs. The file may be missing.
        """
        try:
            text = Path(self.config.throttle).read_text() if self.config.throttle else "{}"
        except FileNotFoundError:
            return 1.0
        return float(json.loads(text).get(os.environ.get("HOLMES_LAB_NODE", ""), 1.0))

    def warn_if_unused(self) -> None:
        """Print a warning if no pass was emulated, since the class names are then probably wrong."""
        if self.calls == 0:
            names = ", ".join(self.config.classes + self.config.plain)
            print(
                f"holmes lab: the emulated accelerator paced nothing: no layer of class {names} ran",
                file=sys.stderr,
            )

    def _role_of(self, module_class: type) -> _Role:
        """Return whether modules of a class are emulated layers, and whether these have attention.

        The settings name such classes: `classes` those with attention, `plain` those without. A
        class also counts if one of its base classes is named.
        """
        names = {base.__name__ for base in module_class.__mro__}
        if names & {*self.config.classes}:
            return _Role.WITH_ATTENTION
        if names & {*self.config.plain}:
            return _Role.WITHOUT_ATTENTION
        return _Role.NOT_EMULATED

    def _call(
        self, original: Callable, module: Any, args: tuple, kwargs: dict, has_attention: bool
    ) -> Any:
        """Call a layer, sleep until its forward time is over, and prepare its backward pass.

        For the backward pass, two autograd hooks of a _Backward are registered. begin() runs when
        the gradient of the output arrives, and finish() when that of the input is ready.

        Args:
            original: The unpatched torch.nn.Module.__call__.
            module: The layer.
            args, kwargs: Its arguments. Without any tensor, its time is not emulated.
            has_attention: Whether the layer computes attention, too, and so takes longer.
        """
        inputs = list(_tensors((args, kwargs)))
        if not inputs:
            return original(module, *args, **kwargs)
        shape = tuple(inputs[0].shape)
        parameters = sum(parameter.numel() for parameter in module.parameters())
        forward_s = self.seconds(parameters, shape, has_attention)
        self.calls += 1
        # When the gradient of this input is ready, the backward pass of the layer has ended.
        input_with_grad = next((tensor for tensor in inputs if tensor.requires_grad), None)
        has_backward = input_with_grad is not None and sys.modules["torch"].is_grad_enabled()
        backward_s = 2 * forward_s  # gradients of the weights, and of the activations
        if self._delayed_key is not None and has_backward:
            backward_s -= self._delay_gradients(self._delayed_key, module, shape)
        backward = _Backward(self, backward_s, has_input_gradient=input_with_grad is not None)
        if input_with_grad is not None and has_backward:
            # Registered now, because the layer may change its input in place.
            input_with_grad.register_hook(backward.finish)
        start = self.clock()
        self._inside = True
        try:
            result = original(module, *args, **kwargs)
        finally:  # checkpointing ends a recomputation by an exception: it took its time all the same
            self._inside = False
            self.sleep_until(start + forward_s)
            _call_listeners("forward", start, self.clock())
            # A forward pass during a backward pass is a recomputation (activation checkpointing).
            # The backward pass then ends later by its time.
            if self.unfinished is not None:
                self.unfinished.end += self.clock() - start
        output = next((tensor for tensor in _tensors(result) if tensor.requires_grad), None)
        if output is not None and output.grad_fn is not None:
            # This tensor is the input of the next layer, whose finish() is a hook of the tensor.
            # begin() is a hook of the tensor's autograd node: autograd calls these afterwards.
            output.grad_fn.register_prehook(backward.begin)
        return result

    def _delay_gradients(
        self, delayed: DelayedGradients, module: Any, shape: tuple[int, ...]
    ) -> float:
        """Move the emulated time of a layer's weight gradients from its backward pass to later.

        The pipeline schedule itself delays computing these gradients. This function only moves
        their seconds: it adds them to self._delayed_s, for the later call
        (pace_delayed_gradients()).

        Only weight matrices, the parameters with two dimensions, have delayed gradients. Computing them takes
        the FLOP of the forward products with these matrices. Attention has no weights; its FLOP stay.

        Args:
            delayed: Key of self._delayed_s. It identifies the later call that computes the gradients.
            module: The layer.
            shape: Shape of its input.

        Returns:
            The moved seconds. The caller subtracts them from the time of the backward pass.
        """
        matrices = [weight for weight in module.parameters() if weight.dim() == _MATRIX_DIMENSIONS]
        weights = sum(weight.numel() for weight in matrices)
        seconds = self.seconds(weights, shape, has_attention=False)
        self._delayed_s[delayed] += seconds
        return seconds

    def sleep_until(self, moment: float) -> None:
        """Sleep until a time of the clock; return at once if it has passed."""
        remaining = moment - self.clock()
        if remaining > 0:
            self.sleep(remaining)


class _Backward:
    """Backward pass of one call of a layer. It sleeps until its emulated time is over.

    begin() and finish() are hooks of autograd. They do not change the gradient. begin() runs when
    the gradient of the layer's output arrives, and finish() when the gradient of its input is
    ready.

    The output of layer 1 may be the input of layer 2. The gradient of this tensor ends the backward
    pass of layer 2 and begins that of layer 1. Autograd may call begin() of layer 1 before finish()
    of layer 2. So begin() of layer 1 first ends the backward pass of layer 2.
    """

    def __init__(self, pacer: Pacer, target: float, has_input_gradient: bool):
        """Prepare the emulated backward pass of one call of a layer.

        Args:
            pacer: Provides the clock. Its `unfinished` is the backward pass that runs now, of any
                layer.
            target: Seconds that the backward pass takes on the emulated GPU.
            has_input_gradient: Whether an input of the layer gets a gradient. The backward pass
                then ends in a hook of that gradient. If not, nothing shows its end, so it sleeps
                all of its time at its start.
        """
        self.pacer, self.target, self.has_input_gradient = pacer, target, has_input_gradient
        self.start = self.end = 0.0

    def begin(self, _: Any) -> None:
        """Start the backward pass when the output's gradient arrives, and sleep half of its time.

        The layer's gradients of weights then become ready in the middle of the backward pass. On a
        GPU, they become ready one after the other during all of it. If no input of the layer gets a
        gradient, no hook can end the backward pass later: it sleeps all of its time now.
        """
        if self.pacer.unfinished is not None:
            # `unfinished` is the backward pass of the next layer (in forward order). It ends with
            # the same gradient, but autograd may call its finish() only after this begin().
            self.pacer.unfinished.finish(None)
        self.pacer.unfinished = self
        self.start = self.pacer.clock()
        self.end = self.start + self.target
        if self.has_input_gradient:
            self.pacer.sleep_until(self.start + self.target / 2)
        else:
            self.finish(None)

    def finish(self, _: Any) -> None:
        """End the backward pass when the input's gradient is ready, unless it has ended already."""
        if self.pacer.unfinished is self:
            self.pacer.sleep_until(self.end)
            self.pacer.unfinished = None
            _call_listeners("backward", self.start, self.pacer.clock())


def _tensors(value: Any) -> Iterator[Any]:
    """Yield the tensors in nested tuples, lists and dicts."""
    if isinstance(value, sys.modules["torch"].Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
