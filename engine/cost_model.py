"""How long does a stage take for a step? Coefficients from a file, or fitted from when steps were sent and returned.

A stage's time is ``step + row * rows + token * tokens + attention * sum(2 * context * x + x * x)`` over the rows' x
tokens; the last stage takes ``head`` longer for a step that samples.
"""

import json
import math
from collections import deque
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ipc.errors import ConfigError

Vector = NDArray[np.float64]

WINDOW = 256
"""Measured steps that a fit looks at."""

REFIT_EVERY = 32
"""Steps between two fits: one takes some 300 us."""

ROBUST_ERROR = 2.0
"""Errors beyond this many times the usual one count as if they were no larger: a pause is not a property of a step."""

TRUST = 1e-3
"""Pull towards the estimate so far, in steps' worth of evidence: decides only what the window says nothing about."""

SCALE = np.array((2e-3, 2e-5, 5e-5, 2e-9, 1e-3))
"""Usual sizes of the five coefficients: how far apart two values of one are is measured with this."""

MEMORY = 0.995
"""What remains, from fit to fit, of the weight of measurements that have left the window: they alone tell of work that
has not come lately, such as prompts while only decodes run."""

BUSY_SHARE = 0.05
"""Expected error of one measurement, relative; beside it ``JITTER_S``."""

JITTER_S = 1e-4


@dataclass(frozen=True, slots=True)
class StepShape:
    """What a stage's time depends on."""

    num_rows: int
    num_tokens: int
    attention: int
    """Sum of 2 * context * x + x * x over the rows: pairs of tokens that attention looks at, doubled."""
    samples: bool
    """Some row samples, so that the last stage runs its head."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Coefficients:
    """Seconds per unit of work on one stage. The defaults are a guess for before anything was measured."""

    step_s: float = 2e-3
    """For any step: reading the weights, launching kernels."""
    row_s: float = 2e-5
    token_s: float = 5e-5
    attention_s: float = 2e-9
    head_s: float = 1e-3
    """More on the last stage, when a step samples."""
    return_s: float = 0.0
    """From the last stage's end until its tokens are known; nobody computes meanwhile. Never fitted: part of the head."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not (isinstance(value, (int, float)) and math.isfinite(value) and value >= 0):
                raise ConfigError(field.name, f"must be a number of seconds, at least 0, got {value!r}")
        if self.step_s + self.token_s <= 0:
            raise ConfigError("step_s", "and token_s are both 0; a step must take time")

    @classmethod
    def read(cls, path: str) -> "Coefficients":
        """From a JSON object with this class's fields as keys. Raises ConfigError."""
        try:
            values = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError("coefficients", f"{path} can't be read as JSON: {error}") from None
        known = {field.name for field in fields(cls)}
        if not isinstance(values, dict) or not set(values) <= known:
            raise ConfigError("coefficients", f"{path} must hold a JSON object with keys among {', '.join(sorted(known))}")
        return cls(**values)

    def stage_time(self, shape: StepShape) -> float:
        """Of any stage; the last one's head comes on top."""
        return (
            self.step_s
            + self.row_s * shape.num_rows
            + self.token_s * shape.num_tokens
            + self.attention_s * shape.attention
        )

    def decode_time(self, context: float) -> float:
        """What one more decode adds to a stage's time."""
        return self.row_s + self.token_s + self.attention_s * (2 * context + 1)

    def prompt_time(self, num_tokens: float, squares: float) -> float:
        """Stage time for prompts of this many tokens, the squares of whose lengths add up to ``squares``; without steps."""
        return self.token_s * num_tokens + self.attention_s * squares

    def chunk_size(self, context: int, time_s: float) -> int:
        """Most tokens behind ``context`` earlier ones that one stage computes in this time, without the step's constant."""
        linear = self.token_s + 2 * self.attention_s * context
        available = time_s - self.row_s
        if available <= 0:
            return 0
        # The positive root of attention * x^2 + linear * x = available, in the form that stays exact for small attention.
        root = linear + math.sqrt(linear * linear + 4 * self.attention_s * available)
        return int(min(2 * available / root, 1 << 30)) if root else 1 << 30


class FixedCosts:
    """Costs that are known: what is measured changes nothing."""

    is_known = True

    def __init__(self, coefficients: Coefficients) -> None:
        self.coefficients = coefficients
        self.num_fits = 0

    def sent(self, step_id: int, shape: StepShape, now: float, needs_step: int) -> None:
        """Nothing to learn."""

    def returned(self, step_id: int, now: float) -> None:
        """Nothing to learn."""


_Work = tuple[float, float, float, float, float]
"""Units of work, one entry for each coefficient in the order of the class."""

_NO_WORK: _Work = (0.0, 0.0, 0.0, 0.0, 0.0)
_HEAD: _Work = (0.0, 0.0, 0.0, 0.0, 1.0)


class _Path(NamedTuple):
    """What decides when something ends."""

    time: float
    """In the model's time."""
    gradient: _Work
    """Work on the path, counted from ``origin``: how the end depends on the coefficients."""
    origin: int
    """The step whose sending began that path."""


class _Prediction(NamedTuple):
    """When a step should return."""

    path: _Path
    offset: float
    """How late the model ran when the step that the path begins with was sent."""


class FittedCosts:
    """Learns coefficients from a running pipeline.

    A replica of the pipeline predicts when each step returns: a stage starts a step when it has finished the one before
    and the stage in front has finished this one. The path of work that decides a return says how the return depends on
    the coefficients; every measured return is one linear equation, and a robust least-squares fit takes the latest ones.
    """

    # Plain numbers, no arrays: a step costs some microseconds this way, and ten times as many with arrays of five numbers.

    is_known = False

    def __init__(self, num_stages: int, prior: Coefficients | None = None) -> None:
        self.coefficients = prior or Coefficients()
        self.num_fits = 0
        self._theta = _vector(self.coefficients)
        self._paths = [_Path(-math.inf, _NO_WORK, 0)] * num_stages
        """Per stage: what decides when it has finished the newest step that it has got."""
        self._pending: dict[int, _Prediction] = {}
        self._offset = 0.0
        """Latest measured return minus the predicted one."""
        self._offsets: dict[int, float] = {}
        self._last: _Path | None = None
        self._last_return = 0.0
        self._equations: deque[tuple[_Work, float]] = deque()
        """Gradients and seconds of the window; a few more until the next fit."""
        self._memory: Vector = np.zeros((5, 5))
        """Normal matrix of the measurements that have left the window."""
        self._until_fit = REFIT_EVERY // 4

    def sent(self, step_id: int, shape: StepShape, now: float, needs_step: int) -> None:
        """A step goes to the workers, whose first stage needs tokens of an earlier one."""
        work = (1.0, float(shape.num_rows), float(shape.num_tokens), float(shape.attention), 0.0)
        stage_s = _dot(work, self._theta)
        needed = self._pending.get(needs_step)
        begin = now - self._offset
        start = self._paths[0]
        if begin >= start.time and (needed is None or begin >= needed.path.time):
            start = _Path(begin, _NO_WORK, step_id)
        elif needed is not None and needed.path.time > start.time:
            start = needed.path
        paths: list[_Path] = []
        for path in self._paths:
            # On the first stage nothing is earlier than the start; behind it, the stage in front may be what is waited for.
            if paths and path.time >= start.time:
                start = path
            start = _Path(start.time + stage_s, _sum(start.gradient, work), start.origin)
            paths.append(start)
        if shape.samples:
            end = paths[-1]
            paths[-1] = _Path(end.time + self._theta[4], _sum(end.gradient, _HEAD), end.origin)
        self._paths = paths
        self._offsets[step_id] = self._offset
        self._pending[step_id] = _Prediction(paths[-1], self._offsets.get(paths[-1].origin, self._offset))

    def returned(self, step_id: int, now: float) -> None:
        """The oldest step came back."""
        prediction = self._pending.pop(step_id)
        path, last = prediction.path, self._last
        if last is not None and last.origin == path.origin:
            gradient = _difference(path.gradient, last.gradient)
            error = (now - self._last_return) - (path.time - last.time)
        else:
            gradient = path.gradient
            error = now - path.time - prediction.offset
        # Two predictions may lie on one path though coefficients have changed between them: time is what work explains.
        self._learn(gradient, _dot(gradient, self._theta) + error)
        self._offset = now - path.time
        self._last, self._last_return = path, now
        if len(self._offsets) > 4 * len(self._paths) + 64:
            oldest = min((p.path.origin for p in self._pending.values()), default=step_id)
            self._offsets = {key: value for key, value in self._offsets.items() if key >= oldest}

    def _learn(self, gradient: "_Work", time_s: float) -> None:
        if time_s <= 0 or not any(gradient):
            return
        self._equations.append((gradient, time_s))
        self._until_fit -= 1
        if self._until_fit <= 0:
            self._until_fit = REFIT_EVERY
            while len(self._equations) > WINDOW:
                old, old_s = self._equations.popleft()
                row = np.array(old) * SCALE / (BUSY_SHARE * old_s + JITTER_S)
                self._memory += np.outer(row, row)
            self._fit()

    def _fit(self) -> None:
        rows = np.array([gradient for gradient, _ in self._equations]) * SCALE
        times = np.array([time_s for _, time_s in self._equations])
        weights = 1.0 / (BUSY_SHARE * times + JITTER_S)
        start = np.array(self._theta) / SCALE
        self._memory *= MEMORY
        estimate = _non_negative_fit(rows, times, weights, start, self._memory)
        for _ in range(3):
            errors = np.abs(rows @ estimate - times) * weights
            usual = max(float(np.median(errors)), 1e-6)
            trust = np.sqrt(np.minimum(1.0, ROBUST_ERROR * usual / np.maximum(errors, 1e-12)))
            estimate = _non_negative_fit(rows, times, weights * trust, start, self._memory)
        step_s, row_s, token_s, attention_s, head_s = (estimate * SCALE).tolist()
        self._theta = (step_s, row_s, token_s, attention_s, head_s)
        if step_s + token_s > 0:
            self.coefficients = Coefficients(
                step_s=step_s, row_s=row_s, token_s=token_s, attention_s=attention_s, head_s=head_s
            )
            self.num_fits += 1


CostModel = FixedCosts | FittedCosts


def _vector(coefficients: Coefficients) -> _Work:
    c = coefficients
    return (c.step_s, c.row_s, c.token_s, c.attention_s, c.head_s)


def _dot(a: _Work, b: _Work) -> float:
    return a[0] * b[0] + a[1] * b[1] + a[2] * b[2] + a[3] * b[3] + a[4] * b[4]


def _sum(a: _Work, b: _Work) -> _Work:
    return (a[0] + b[0], a[1] + b[1], a[2] + b[2], a[3] + b[3], a[4] + b[4])


def _difference(a: _Work, b: _Work) -> _Work:
    return (a[0] - b[0], a[1] - b[1], a[2] - b[2], a[3] - b[3], a[4] - b[4])


def _non_negative_fit(rows: Vector, times: Vector, weights: Vector, start: Vector, memory: Vector) -> Vector:
    """Least squares, with a pull to ``start`` of the weight ``memory``; coefficients that would fall below zero are zero."""
    free = np.ones(rows.shape[1], bool)
    matrix, target = rows * weights[:, None], times * weights
    estimate = np.zeros(rows.shape[1])
    # One column leaves at a time at least, so this ends.
    while free.any():
        part: Any = matrix[:, free]
        normal = part.T @ part
        pull = memory[np.ix_(free, free)] + TRUST * max(float(np.trace(normal)) / len(normal), 1e-12) * np.eye(len(normal))
        solved = np.linalg.solve(normal + pull, part.T @ target + pull @ start[free])
        estimate[:] = 0.0
        estimate[free] = solved
        if (solved >= 0).all():
            break
        free &= estimate > 0
    return estimate
