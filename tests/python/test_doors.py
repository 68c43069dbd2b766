"""Ways to a tensor's data that are no operators: each gives the very data, wherever it is and whatever step is due."""

from __future__ import annotations

import contextlib
import copy
import ctypes
import gc
import io
import os
import pickle
import signal
import subprocess
import threading
from pathlib import Path
from typing import Any, Callable

import misa
import numpy
import pytest
import torch
from torch import nn

from tests.python.beside import assert_identical, digest
from tests.python.models import Transformer, batch, loss_of
from tests.python.processes import TrainerProcess
from tests.python.small_training import manage, mlp, train

MIB = 1 << 20


def loads(run: misa.Run) -> int:
    return run.report()["demand_loads"] + run.report()["prefetch_loads"]


class Compiled:
    """Small C functions over raw pointers: what a kernel does that torch knows nothing of."""

    SOURCE = r"""
    double total(const float* data, long count) { double sum = 0; for (long i = 0; i < count; ++i) sum += data[i]; return sum; }
    void scale(float* data, long count, float by) { for (long i = 0; i < count; ++i) data[i] *= by; }
    """

    def __init__(self, folder: Path) -> None:
        (folder / "raw.c").write_text(self.SOURCE, encoding="utf-8")
        subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", folder / "raw.so", folder / "raw.c"], check=True)
        # One lets the interpreter's lock go meanwhile, the other does not.
        self.free, self.locked = ctypes.CDLL(str(folder / "raw.so")), ctypes.PyDLL(str(folder / "raw.so"))
        for library in (self.free, self.locked):
            library.total.restype = ctypes.c_double

    @staticmethod
    def total(library: Any, tensor: torch.Tensor, address: int | None = None) -> float:
        return library.total(ctypes.c_void_p(address or tensor.data_ptr()), ctypes.c_long(tensor.numel()))

    @staticmethod
    def scale(library: Any, tensor: torch.Tensor, by: float) -> None:
        library.scale(ctypes.c_void_p(tensor.data_ptr()), ctypes.c_long(tensor.numel()), ctypes.c_float(by))


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    return Compiled(tmp_path_factory.mktemp("raw"))


# ------------------------------------------------------------------------------------------------------------ looks


def saved(tensor: torch.Tensor) -> torch.Tensor:
    memory = io.BytesIO()
    torch.save({"tensor": tensor.detach()}, memory)
    memory.seek(0)
    return torch.load(memory)["tensor"]


def saved_to_a_file(tensor: torch.Tensor) -> torch.Tensor:
    path = f"/tmp/misa-t-{os.getpid()}.pt"
    try:
        torch.save({"tensor": tensor.detach()}, path)
        return torch.load(path)["tensor"]
    finally:
        os.unlink(path)


def by_address(tensor: torch.Tensor) -> torch.Tensor:
    raw = (ctypes.c_float * tensor.numel()).from_address(tensor.data_ptr())
    return torch.tensor(numpy.frombuffer(raw, dtype=numpy.float32).copy()).reshape(tensor.shape)


def from_storage(tensor: torch.Tensor) -> torch.Tensor:
    return torch.frombuffer(bytearray(bytes(tensor.untyped_storage())), dtype=torch.float32).reshape(tensor.shape)


def shared(tensor: torch.Tensor) -> torch.Tensor:
    copied = tensor.detach()
    copied.untyped_storage().share_memory_()
    return copied.clone()


LOOKS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "numpy": lambda t: torch.from_numpy(t.detach().numpy().copy()),
    "array": lambda t: torch.from_numpy(numpy.array(t.detach())),
    "data_ptr": by_address,
    "tolist": lambda t: torch.tensor(t.detach().tolist()),
    "dlpack": lambda t: torch.from_numpy(numpy.from_dlpack(t.detach()).copy()),
    "dlpack capsule": lambda t: torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(t.detach())).clone(),
    "storage": from_storage,
    "storage element": lambda t: t.detach() * 0 + t if t.untyped_storage()[0] is not None else t,
    "save": saved,
    "save to a file": saved_to_a_file,
    "pickle": lambda t: pickle.loads(pickle.dumps(t.detach())),
    "deepcopy": copy.deepcopy,
    "share_memory": shared,
    "data": lambda t: torch.tensor(t.data.tolist()),
    "view": lambda t: torch.from_numpy(t.detach().view(-1)[3:].numpy().copy()).new_tensor(
        t.detach().view(-1).numpy().copy()).reshape(t.shape),
    "item": lambda t: t.detach() + 0 * t.detach()[0, 0].item(),
    "repr": lambda t: t.detach().clone() if repr(t) else t,
}


@pytest.mark.parametrize("where", ["away", "due", "due and away"])
@pytest.mark.parametrize("name", LOOKS)
def test_every_look_gives_the_data(shared_misad, name, where):
    plain_model, plain_optimizer = mlp()
    model, optimizer = mlp()
    train(plain_model, plain_optimizer, range(1))
    run = manage(shared_misad, model, optimizer)
    train(model, optimizer, range(1))  # where all fits, later steps are done at once
    if where == "away":
        run.flush()
    if where != "due":
        assert run.unload_all()
    weight = model.blocks[3].weight
    if where != "away":
        assert run._manager.is_pending(run._module_of[id(weight)])
    result = LOOKS[name](weight)
    assert torch.equal(result.detach(), plain_model.blocks[3].weight.detach())
    train(model, optimizer, range(1, 3))
    train(plain_model, plain_optimizer, range(1, 3))
    run.release()
    assert digest(model, optimizer) == digest(plain_model, plain_optimizer)


@pytest.mark.parametrize("where", ["away", "due", "due and away"])
@pytest.mark.parametrize("kind", ["numpy", "address", "address, lock held", "dlpack"])
def test_a_pointer_taken_earlier_shows_the_data_of_now(shared_misad, compiled, kind, where):
    plain_model, plain_optimizer = mlp()
    model, optimizer = mlp()
    run = manage(shared_misad, model, optimizer, stress=where == "due and away")  # where all fits, steps are not deferred for long
    weight = model.blocks[3].weight
    array = weight.detach().numpy()
    dlpack = numpy.from_dlpack(weight.detach())
    address = weight.data_ptr()
    looks = {
        "numpy": lambda: numpy.array_equal(array, plain_model.blocks[3].weight.detach().numpy()),
        "dlpack": lambda: numpy.array_equal(dlpack, plain_model.blocks[3].weight.detach().numpy()),
    }
    for kind_, library in (("address", compiled.free), ("address, lock held", compiled.locked)):
        looks[kind_] = lambda library=library: (compiled.total(library, weight, address)
                                                == compiled.total(library, plain_model.blocks[3].weight))
    for step in range(3):
        train(plain_model, plain_optimizer, range(step, step + 1))
        train(model, optimizer, range(step, step + 1))
        if where == "away":
            run.flush()
        if where != "due":
            assert run.unload_all()
        assert looks[kind](), step
    assert weight.data_ptr() == address
    run.release()
    # Nor does the end of the management take it away.
    assert weight.data_ptr() == address
    assert looks[kind]()
    with torch.no_grad():
        weight.mul_(2)
    assert numpy.array_equal(array, plain_model.blocks[3].weight.detach().numpy() * 2)


@pytest.mark.parametrize("pressure", ["tight", "stress"])
def test_writes_by_pointers_are_trained_on(shared_misad, compiled, pressure):
    """Through an array taken once, and through an address, between steps: as in plain training."""

    def loop(manage: Any) -> Any:
        torch.manual_seed(7)
        model = Transformer()
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        seen = []
        with manage(model, optimizer):
            arrays = [model.blocks[i].up.weight.detach().numpy() for i in range(3)]
            for step in range(4):
                optimizer.zero_grad()
                loss_of(model, step).backward()
                optimizer.step()
                arrays[step % 3][:, step] *= 0.5
                arrays[(step + 1) % 3][0, 0] = step
                compiled.scale(compiled.free, model.blocks[1].query.weight, 0.9)
                compiled.scale(compiled.locked, model.blocks[2].query.weight, 0.9)
                seen.append([float(a.sum()) for a in arrays])
            del arrays
        return model, optimizer, seen

    assert_identical(loop, shared_misad, pressure, key=("writes by pointers", 0), share=0.6)


def test_a_library_operator_that_uses_pointers(shared_misad, compiled):
    """Unknown to torch's kernels, with an argument it writes, forward and backward."""

    @torch.library.custom_op("misa_test::total", mutates_args=())
    def total(data: torch.Tensor) -> torch.Tensor:
        return torch.tensor(compiled.total(compiled.free, data))

    @torch.library.custom_op("misa_test::scale_", mutates_args=("data",))
    def scale_(data: torch.Tensor, by: float) -> None:
        compiled.scale(compiled.locked, data, by)

    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (data,) = ctx.saved_tensors
        return gradient * data * compiled.total(compiled.free, data)

    total.register_autograd(backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))

    def loop(manage: Any) -> Any:
        model, optimizer = mlp()
        with manage(model, optimizer):
            for step in range(3):
                optimizer.zero_grad()
                (loss_of(model, step) + 1e-4 * total(model.blocks[2].weight)).backward()
                optimizer.step()
                with torch.no_grad():
                    scale_(model.blocks[1].weight, 0.9)
        return model, optimizer, []

    assert_identical(loop, shared_misad, "stress", key=("library operator", 0))


def test_cuda_graphs_are_refused(shared_misad):
    model, optimizer = mlp()
    before = torch.cuda.CUDAGraph.__dict__.get("capture_begin")
    run = manage(shared_misad, model, optimizer)
    with pytest.raises(RuntimeError, match="CUDA graph.*nothing was captured"):
        torch.cuda.CUDAGraph.capture_begin(None)
    run.release()
    assert torch.cuda.CUDAGraph.__dict__.get("capture_begin") is before


def test_the_doors_are_torchs_own_again_afterwards(shared_misad):
    def doors() -> list[Any]:
        return [vars(torch.Tensor).get(n) for n in ("numpy", "data_ptr", "__dlpack__")] + [
            vars(torch.UntypedStorage).get("data_ptr"), torch._C._to_dlpack, torch.utils.dlpack.to_dlpack]

    before = doors()
    model, optimizer = mlp()
    run = manage(shared_misad, model, optimizer)
    assert doors() != before
    run.release()
    assert doors() == before


# --------------------------------------------------------------------------------------------- what needs no data


METADATA: dict[str, Callable[[torch.Tensor], Any]] = {
    "detach": lambda w: w.detach(),
    "data": lambda w: w.data,
    "view": lambda w: w.view(-1),
    "t": lambda w: w.t(),
    "transpose": lambda w: w.transpose(0, 1),
    "permute": lambda w: w.permute(1, 0),
    "expand": lambda w: w.expand(3, -1, -1),
    "slice": lambda w: w[3:7, ::2],
    "select": lambda w: w[5],
    "narrow": lambda w: w.narrow(0, 1, 2),
    "chunk": lambda w: w.chunk(4),
    "split": lambda w: w.split(16),
    "unbind": lambda w: w.unbind(),
    "unsqueeze": lambda w: w.unsqueeze(0).squeeze(0),
    "as_strided": lambda w: w.as_strided((2, 2), (1, 1)),
    "unflatten": lambda w: w.unflatten(0, (2, -1)),
    "flatten": lambda w: w.flatten(),
    "diagonal": lambda w: w.diagonal(),
    "view_as": lambda w: w.view_as(w),
    "alias": lambda w: torch.ops.aten.alias(w),
    "requires_grad_": lambda w: w.requires_grad_(True),
    "shape": lambda w: (w.shape, w.stride(), w.dtype, w.numel(), w.is_contiguous(), w.storage_offset(), len(w)),
    "is_leaf": lambda w: (w.is_leaf, w.grad_fn, w.requires_grad, w._version),
    "empty_like": lambda w: torch.empty_like(w),
    "zeros_like": lambda w: torch.zeros_like(w),
    "new_zeros": lambda w: w.new_zeros(3),
    "state_dict": lambda w: w.owner.state_dict(),
    "named_parameters": lambda w: dict(w.owner.named_parameters()),
    "zero_grad": lambda w: w.owner.zero_grad(),
    "same device": lambda w: w.to("cpu"),
    "same type": lambda w: w.float(),
    "contiguous": lambda w: w.contiguous(),
    "untyped_storage": lambda w: w.untyped_storage().nbytes(),
    "hash": lambda w: {w: 1},
}


@torch.no_grad()
def test_operators_of_shape_alone_load_nothing(shared_misad):
    """Neither the data nor a step that is due; what is done with their results later does."""
    plain_model, plain_optimizer = mlp()
    model, optimizer = mlp()
    with torch.enable_grad():
        train(plain_model, plain_optimizer, range(1))
        run = manage(shared_misad, model, optimizer)
        train(model, optimizer, range(1))
    weight = model.blocks[3].weight
    weight.owner = model
    assert run.unload_all()
    before = loads(run)
    kept = {}
    loading = []
    for name, look in METADATA.items():
        kept[name] = look(weight)
        if loads(run) != before:
            loading.append(name)
            assert run.unload_all()
            before = loads(run)
    with torch.enable_grad():
        for look in (weight.detach, lambda: weight.data, model.state_dict, lambda: list(model.named_parameters())):
            look()
    assert loads(run) == before
    assert loading == []
    assert run._manager.is_pending(run._module_of[id(weight)])
    expected = plain_model.blocks[3].weight.detach()
    for name in ("detach", "data", "view", "t", "slice", "expand", "unbind", "diagonal"):
        assert run.unload_all()
        result, wanted = kept[name], METADATA[name](expected)
        if name == "unbind":
            result, wanted = torch.stack(result), torch.stack(wanted)
        assert torch.equal(result.detach(), wanted), name
        assert loads(run) > before, name
        before = loads(run)
    run.release()


@pytest.mark.parametrize("pressure", ["tight", "stress"])
def test_views_noted_by_autograd_come_after_the_step_that_is_due(shared_misad, pressure):
    """Several views of one weight may not outlive a change of it: the step is done before they are made."""

    def loop(manage: Any) -> Any:
        model, optimizer = mlp()
        with manage(model, optimizer):
            for step in range(4):
                optimizer.zero_grad()
                h, targets = batch(model, step)
                for number, block in enumerate(model.blocks):
                    if number % 3 == 0:
                        parts = block.weight.chunk(4) if number else block.weight.unbind()
                        parts = parts if number else [torch.stack(parts)]
                        h = torch.tanh(torch.cat([h @ part.t() for part in parts], -1) + block.bias)
                    elif number % 3 == 1:
                        h = torch.tanh(h @ block.weight.t() + block.bias.view(1, -1))
                    else:
                        h = torch.tanh(block(h))
                nn.functional.cross_entropy(model.head(h), targets).backward()
                optimizer.step()
        return model, optimizer, []

    assert_identical(loop, shared_misad, pressure, key=("views", 0), share=0.6)


# ------------------------------------------------------------------------------------------------- system calls


def test_the_kernel_refuses_what_is_away(shared_misad):
    """A system call on an array taken earlier cannot wait: an error of the system, never other bytes; `resident` is the way."""
    model, optimizer = mlp()
    run = manage(shared_misad, model, optimizer)
    weight = model.blocks[3].weight
    array = weight.detach().numpy()
    expected = array.tobytes()
    assert run.unload_all()
    reader, writer = os.pipe()
    with pytest.raises(OSError, match="Bad address"):
        os.write(writer, memoryview(array)[:8])
    with misa.resident(weight):
        assert os.write(writer, memoryview(array)[:8]) == 8 * 128 * 4
    assert os.read(reader, 8 * 128 * 4) == expected[: 8 * 128 * 4]
    os.close(reader)
    os.close(writer)
    run.release()


def test_an_array_made_before_is_said_to_be_left_behind(shared_misad, capfd):
    model, optimizer = mlp()
    array = model.blocks[3].weight.detach().numpy()
    model.blocks[2].weight.detach().numpy().sum()  # is gone by now
    kept = array.copy()
    run = manage(shared_misad, model, optimizer)
    assert [n.split(" before misa")[0] for n in run.report()["notices"]] == [
        "A NumPy array was made over parameter blocks.3.weight"]
    train(model, optimizer, range(2))
    assert numpy.array_equal(array, kept)
    run.release()
    assert numpy.array_equal(array, kept)
    assert not numpy.array_equal(model.blocks[3].weight.detach().numpy(), kept)


# --------------------------------------------------------------------------------------- what cannot be served

PROGRAM = """
import ctypes, faulthandler, os, sys, torch, misa
torch.manual_seed(7)
model = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(6)])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
base = misa.memory.live_bytes() - sum(4 * p.numel() for p in model.parameters())
with misa.manage(model, optimizer, budget=base + (1200 << 10), runtime_dir={runtime!r}, daemon="required", wait_seconds=5) as run:
    array = model[0].weight.detach().numpy()

    def in_child(name, work):
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            os.dup2(os.open({folder!r} + "/" + name, os.O_WRONLY | os.O_CREAT), 2)
            work()
            os._exit(77)
        print(name, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)

    def with_faulthandler():
        faulthandler.enable()          # over ours
        ctypes.string_at(0)

    def too_deep():
        faulthandler.enable()
        sys.setrecursionlimit(10 ** 9)
        deep = lambda: sorted([1], key=lambda _: deep())
        deep()

    in_child("default", lambda: ctypes.string_at(0))
    in_child("faulthandler", with_faulthandler)
    faulthandler.enable()              # and below ours, after a step
    optimizer.zero_grad(); model(torch.ones(1, 256)).sum().backward(); optimizer.step()
    in_child("below", lambda: ctypes.string_at(0))
    run.unload_all()                   # over ours again, and the next fault is ours
    faulthandler.enable()
    array.sum()
    in_child("deep", too_deep)
    in_child("child", lambda: array.sum())
    run.unload_all()
    seen = array.tobytes()             # through the pointer first
    print("value", seen == model[0].weight.detach().clone().numpy().tobytes(), flush=True)
    import contextlib
    with contextlib.ExitStack() as held:
        optimizer.zero_grad()
        held.enter_context(misa.resident(model[1].weight))
        filler = []
        with contextlib.suppress(RuntimeError):      # as full as it gets
            while True:
                filler.append(torch.empty(10_000))
        array.sum()
"""


def test_what_cannot_be_served_ends_with_a_sentence_and_others_faults_are_as_before(shared_misad, folder):
    program = PROGRAM.format(runtime=str(shared_misad.runtime_dir), folder=str(folder))
    with TrainerProcess(folder, program=program) as trainer:
        assert trainer.line("default") == "-11"
        assert trainer.line("faulthandler") == "-11"
        assert trainer.line("below") == "-11"
        assert trainer.line("deep") == "-11"
        assert trainer.line("child") == "-6"
        assert trainer.line("value") == "True"
        assert trainer.process.wait(timeout=60) == -6
        errors = trainer.errors()
    assert "raw pointer" in errors and "smallest budget that works here is" in errors and "0 weights" in errors, errors
    assert "Fatal Python error: Aborted" in errors, errors
    assert (folder / "default").read_text() == ""
    for name in ("faulthandler", "below"):
        text = (folder / name).read_text()
        assert text.count("Fatal Python error: Segmentation fault") == 1 and "string_at" in text, text
    assert "Fatal Python error: Segmentation fault" in (folder / "deep").read_text()
    assert "in the process that was forked from" in (folder / "child").read_text()


def test_children_forked_while_threads_allocate_can_allocate(shared_misad):
    """The allocator's lock does not stay closed in a child that was forked while another thread had it."""
    model, optimizer = mlp()
    run = manage(shared_misad, model, optimizer)
    stop = threading.Event()

    def allocate() -> None:
        while not stop.is_set():
            torch.empty(100_000)

    threads = [threading.Thread(target=allocate) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(40):
            pid = os.fork()
            if pid == 0:
                signal.alarm(20)
                torch.empty(200_000)
                os._exit(0)
            assert os.waitpid(pid, 0)[1] == 0
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    run.release()


def test_what_does_not_fit_is_an_exception_where_the_door_is_known(shared_misad):
    gc.collect()
    model, optimizer = mlp(layers=10)
    base = misa.memory.live_bytes() - 4 * sum(p.numel() for p in model.parameters())
    run = manage(shared_misad, model, optimizer, budget=base + (430 << 10))
    assert run.unload_all()
    with contextlib.ExitStack() as held:
        with pytest.raises(RuntimeError, match="too small.*smallest budget"):
            for block in model.blocks:
                held.enter_context(misa.resident(block.weight))
        refused = next(b for b in model.blocks if dict(run.states())[f"blocks.{list(model.blocks).index(b)} weights"] != "device")
        with pytest.raises(RuntimeError, match="too small.*smallest budget"):
            refused.weight.data_ptr()
    assert refused.weight.data_ptr() != 0
    run.release()
