"""The tensors of a target file for several threads."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

from reshard.plan.pieces import TargetTensor, TargetTensors


def test_a_thread_gets_its_tensor_if_another_takes_one_at_any_moment() -> None:
    single = [TargetTensor(name, 1, (), ()) for name in ("a", "b")]
    tensors = TargetTensors(["a", "b"], [0, 1], [], single, lambda *_: None)  # type: ignore[arg-type]
    moments = 0

    def interrupt(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal moments
        if frame.f_code is not TargetTensors.__getitem__.__code__:
            return None
        frame.f_trace_opcodes = True
        moments += event == "opcode"
        # Functions that are called here are not traced.
        assert tensors[1].name == "b"
        return interrupt

    for _ in range(2):
        sys.settrace(interrupt)
        try:
            name = tensors[0].name
        finally:
            sys.settrace(None)
        assert name == "a"
    assert moments > 10
