"""Training steps of transformers' models: one step, and the speed of many methods in turns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial

import common
import torch
import torch.nn.functional as F
from common import Clock, Row
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

Inputs = dict[str, Tensor | int]  # of a model's forward, the labels among them

OURS = "exact_tiled"  # transformers takes a name with "flash" in it for a package of that name
BACKENDS = {
    "sdpa_pick": None,  # what PyTorch chooses by itself
    "sdpa_fa2": SDPBackend.FLASH_ATTENTION,
    "sdpa_efficient": SDPBackend.EFFICIENT_ATTENTION,
    "sdpa_cudnn": SDPBackend.CUDNN_ATTENTION,
}
# What is claimed first, as minutes may be over before all had their turn.
METHODS = (OURS, "eager", "sdpa_fa2", "sdpa_cudnn", "sdpa_pick", "sdpa_efficient")
SHOWN = {
    "eager": "eager",
    "sdpa_pick": "SDPA",
    "sdpa_fa2": "SDPA flash",
    "sdpa_efficient": "SDPA efficient",
    "sdpa_cudnn": "SDPA cuDNN",
    OURS: "flashsdk",
}
WARM, TIMED = 2, 8  # steps of a turn


def sdpa_method(backend: SDPBackend | None, *, causal: bool) -> Callable[..., tuple[Tensor, None]]:
    """PyTorch's attention as transformers calls it; causal: by that alone, without a mask."""

    def method(module, query, key, value, attention_mask, scaling=None, dropout=0.0, **_):
        mask = None if causal else attention_mask
        arguments = {"attn_mask": mask, "dropout_p": dropout, "scale": scaling, "is_causal": causal}
        if backend is None:
            out = F.scaled_dot_product_attention(query, key, value, **arguments)
        else:
            with sdpa_kernel(backend):
                out = F.scaled_dot_product_attention(query, key, value, **arguments)
        return out.transpose(1, 2).contiguous(), None

    return method


def padded_vocabulary(words: int) -> int:
    """The model's, in multiples of 64: fast matrix products want rows of whole 16-byte vectors.

    The words at its end never occur.
    """
    return -(-words // 64) * 64


def optimizer(model: nn.Module, rate: float, *, captured: bool = False) -> torch.optim.AdamW:
    """Weight decay for matrices alone; fused on a GPU; captured: steps go into a CUDA graph."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    rest = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    fused = matrices[0].is_cuda
    betas = (0.9, 0.95)
    return torch.optim.AdamW(groups, lr=rate, betas=betas, fused=fused, capturable=captured)


def loss_of(forward: Callable, inputs: Inputs) -> Tensor:
    with torch.autocast(inputs["labels"].device.type, torch.bfloat16):
        return forward(**inputs).loss


def train_step(forward: Callable, model: nn.Module, optimizer, inputs: Inputs) -> Tensor:
    loss = loss_of(forward, inputs)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.detach()


def compile_layers(model: nn.Module, backend: str = "inductor") -> None:
    """torch.compile of each layer and of the loss, in place.

    All layers share one program for each method. The model as one program takes as many times
    longer to compile as it has layers.
    """
    for module in model.modules():
        if isinstance(module, nn.ModuleList):
            for layer in module:
                layer.compile(dynamic=False, backend=backend)
    # BERT's model calls no loss_function, and is not hurt by it.
    model.loss_function = torch.compile(model.loss_function, dynamic=False, backend=backend)


Step = Callable[[Inputs], Tensor]  # takes a batch, returns its loss


def capture(step: Step, inputs: Inputs) -> Step:
    """A training step as one CUDA graph: the GPU's work, without the host's between kernels.

    Takes one step, to have all that it compiles, and captures another. Batches of the answer need
    the shapes of ``inputs``; its loss is good until its next call.
    """
    kept = {k: x.clone() if isinstance(x, Tensor) else x for k, x in inputs.items()}
    step(kept)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step(kept)

    def replay(batch: Inputs) -> Tensor:
        for name, tensor in batch.items():
            if isinstance(tensor, Tensor):
                kept[name].copy_(tensor)
        graph.replay()
        return loss

    return replay


class Turns:
    """One model and optimizer, which all methods train in turns.

    ``batches`` are the inputs of each method; ``compiled`` runs the model under torch.compile,
    which makes a program for each method, as its name is in the model's configuration: "layers" by
    ``compile_layers``, "graphs" the same with each step captured as a CUDA graph, "whole" the model
    at once.
    """

    def __init__(
        self,
        model: nn.Module,
        batches: dict[str, list[Inputs]],
        *,
        compiled: str | None,
        warm: int = WARM,
        timed: int = TIMED,
    ):
        self.model, self.batches, self.warm, self.timed = model, batches, warm, timed
        self.captured = compiled == "graphs"
        self.optimizer = optimizer(model, 1e-4, captured=self.captured)
        torch._dynamo.reset()
        torch._dynamo.config.recompile_limit = 64
        # Of static shapes, as the methods' batches may have different ones.
        self.forward = torch.compile(model, dynamic=False) if compiled == "whole" else model
        if compiled in ("layers", "graphs"):
            compile_layers(model)
        self.recomputed: set[str] = set()  # methods that fit only so

    def run(self, rounds: int, clock: Clock) -> dict[str, Row]:
        """For each method seconds of a step, peak bytes and the last loss, or an error.

        The seconds are the median of the turns, beside the fastest and the slowest. Where the
        minutes are over, methods have fewer turns. Those without any are left out.
        """
        rows: dict[str, list[Row]] = {method: [] for method in self.batches}
        for _ in range(rounds):
            for method, found in rows.items():
                if clock.over():
                    break
                if found and "error" in found[-1]:
                    continue
                row = self._turn(method)
                # SIGTERM also ends the processes that compile: that is no fault of the method.
                if "error" not in row or not clock.over():
                    found.append(row)
        merged = {}
        for method, found in rows.items():
            if not found:
                continue
            row = {**found[-1], "turns": len(found)}
            if "error" not in row:
                times = [r["seconds"] for r in found]
                row["seconds"] = statistics.median(times)
                row["fastest"], row["slowest"] = min(times), max(times)
            merged[method] = {"recomputed": method in self.recomputed, **row}
        return merged

    def _turn(self, method: str) -> Row:
        row: Row = {"error": "out of memory"}
        if method not in self.recomputed:
            row = self._attempt(method)
        # What is captured cannot recompute: that asks for the state of random numbers.
        recomputes = method == "eager" and not self.captured
        if recomputes and row.get("error") == "out of memory":
            self.recomputed.add(method)
            self.model.gradient_checkpointing_enable()
            row = self._attempt(method)
            self.model.gradient_checkpointing_disable()
        return row

    def _attempt(self, method: str) -> Row:
        try:
            return self._steps(method)
        except Exception as error:  # one method's fault is not to end the others' turns
            row = common.failure(error)
        self.optimizer.zero_grad(set_to_none=True)
        return row

    def _steps(self, method: str) -> Row:
        self.model.config._attn_implementation = method
        batches = self.batches[method]
        device = batches[0]["labels"].device
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        step: Step = partial(train_step, self.forward, self.model, self.optimizer)
        # Steps are queued one behind the other, as a training loop does. To wait after each would
        # count the time that the host needs to begin the next.
        for number in range(self.warm + self.timed):
            if number == self.warm:
                common.synchronise(device)
                if self.captured:
                    step = capture(step, batches[0])
                started = time.perf_counter()
            loss = step(batches[number % len(batches)])
        common.synchronise(device)
        seconds = (time.perf_counter() - started) / self.timed
        peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else None
        return {"seconds": seconds, "memory": peak, "loss": loss.item()}
