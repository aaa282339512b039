"""Transformers on PyTorch, timed in a process of its own: what `benchmark.py step --peers` shows.

Run as a script with a measurement's name as JSON, it prints one JSON line a row.
"""

from __future__ import annotations

import inspect
import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from shapes import config_of

Row = dict[str, Any]
NUM_RUNS, NUM_DRAFT_TOKENS = 5, 7


def run_apart(label: Row, time_limit: float | None) -> Iterator[Row]:
    """Yield the rows of a process that times transformers, as they come.

    Args:
      label: the measurement's shape, batch, capacity, length, dtype and num_steps.
      time_limit: seconds after which the process is stopped.
    """
    command = [sys.executable, __file__, json.dumps(label)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    is_late = threading.Event()

    def stop() -> None:
        is_late.set()  # first: whoever sees the process gone looks at it
        process.kill()

    timer = threading.Timer(time_limit, stop) if time_limit is not None else None
    try:
        if timer is not None:
            timer.start()
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("{"):
                yield json.loads(line)
        code = process.wait()
        if code:
            reason = "time limit" if is_late.is_set() else f"exit code {code}"
            yield {"peer": "process", "error": reason}
    finally:
        if timer is not None:
            timer.cancel()
        process.kill()
        process.communicate()


class Peer:
    """A random Qwen3 of transformers, on the GPU if there is one."""

    def __init__(self, label: Row) -> None:
        import torch
        import transformers

        transformers.utils.logging.set_verbosity_error()
        self.torch, self.transformers, self.label = torch, transformers, label
        self.is_gpu = torch.cuda.is_available()
        self.device = "cuda" if self.is_gpu else "cpu"
        self.versions = {"torch": torch.__version__, "transformers": transformers.__version__}
        torch.manual_seed(0)
        torch.set_default_dtype(getattr(torch, label["dtype"]))
        started = time.perf_counter()
        with torch.device(self.device):
            self.model = transformers.Qwen3ForCausalLM(self.config()).eval()
        self.config_seconds = time.perf_counter() - started
        total = sum(parameter.nbytes for parameter in self.model.parameters())
        is_tied = self.model.config.tie_word_embeddings
        embedding = self.model.get_input_embeddings().weight
        self.weight_bytes = total if is_tied else total - embedding.nbytes
        names = inspect.signature(type(self.model.model).forward).parameters
        self.cache_name = "cache" if "cache" in names else "past_key_values"
        self.takes_positions = "cache_position" in names

    def config(self) -> Any:
        """Return the shape's configuration."""
        config = config_of(self.label["shape"])
        sizes = (
            "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "head_dim",
            "num_attention_heads", "num_key_value_heads", "rms_norm_eps",
            "max_position_embeddings", "tie_word_embeddings",
        )  # fmt: skip
        rope: Row = {"rope_theta": config.rope_theta}
        if int(self.transformers.__version__.split(".")[0]) >= 5:
            rope = {"rope_parameters": {"rope_type": "default"} | rope}
        values = {name: getattr(config, name) for name in sizes}
        return self.transformers.Qwen3Config(**values, **rope, eos_token_id=None)

    def tokens(self, num_tokens: int) -> Any:
        """Return random ids, one row for each text of the batch."""
        shape = (self.label["batch"], num_tokens)
        return self.torch.randint(0, self.model.config.vocab_size, shape, device=self.device)

    def seconds(self, function: Callable[[], Any]) -> float:
        """Return the wall time of a call and of all that it puts on the GPU."""
        if self.is_gpu:
            self.torch.cuda.synchronize()
        started = time.perf_counter()
        function()
        if self.is_gpu:
            self.torch.cuda.synchronize()
        return time.perf_counter() - started

    def compiled_step(self, num_rows: int) -> Row:
        """Time the forward of a block with a static cache, compiled with CUDA graphs."""
        torch, length, capacity = self.torch, self.label["length"], self.label["capacity"]
        torch._dynamo.reset()
        options: Row = {"mode": "reduce-overhead"} if self.is_gpu else {"backend": "eager"}
        forward = torch.compile(self.model.forward, **options)
        cache = self.transformers.StaticCache(config=self.model.config, max_cache_len=capacity)
        num_steps = max(1, min(self.label["num_steps"], (capacity - length) // num_rows))
        block = self.tokens(num_rows)

        def feed(function: Callable[..., Any], ids: Any, start: int) -> None:
            given: Row = {self.cache_name: cache}
            if self.takes_positions:
                given["cache_position"] = torch.arange(ids.shape[1], device=self.device) + start
            function(input_ids=ids, use_cache=True, **given)

        def rewind() -> None:
            for layer in cache.layers:
                if isinstance(getattr(layer, "cumulative_length", None), torch.Tensor):
                    layer.cumulative_length.fill_(length)

        def steps(count: int) -> None:
            for index in range(count):
                if self.is_gpu:
                    torch.compiler.cudagraph_mark_step_begin()
                feed(forward, block, length + index * num_rows)

        feed(self.model.forward, self.tokens(length), 0)
        rewind()
        # The second and third call record the graphs.
        compile_seconds = self.seconds(lambda: steps(min(4, num_steps)))
        times = []
        for _ in range(NUM_RUNS):
            rewind()
            times.append(self.seconds(lambda: steps(num_steps)) / num_steps)
        return {
            "peer": "static cache, torch.compile, forward only",
            "compile_options": options,
            "rows": num_rows,
            "steps": num_steps,
            "compile_seconds": compile_seconds,
        } | self.times(times)

    def generated(self, **options: Any) -> Row:
        """Time `generate`, eager and greedy, by forwards and by tokens."""
        ids = self.tokens(self.label["length"])
        count = [0]
        hook = self.model.register_forward_hook(lambda *_: count.__setitem__(0, count[0] + 1))
        num_new = min(2 * self.label["num_steps"], self.label["capacity"] - self.label["length"])
        given: Row = {"do_sample": False, "min_new_tokens": num_new, "pad_token_id": 0}
        given |= {"attention_mask": self.torch.ones_like(ids)} | options

        def generate(num_tokens: int) -> Any:
            limits = {"max_new_tokens": num_tokens, "min_new_tokens": num_tokens}
            return self.model.generate(ids, **(given | limits))

        generate(4)
        times = []
        for _ in range(2):
            count[0] = 0
            times.append(self.seconds(lambda: generate(num_new)))
        hook.remove()
        seconds = statistics.median(times)
        return {
            "peer": "generate" + (", prompt lookup" if options else ""),
            "settings": options,
            "forwards": count[0],
            "mean_accepted_length": num_new / count[0],
            "tokens_per_second": num_new * self.label["batch"] / seconds,
            "steps": count[0],
        } | self.times([each / count[0] for each in times])

    def times(self, seconds: list[float]) -> Row:
        """Return the fields of the times of a step."""
        median = statistics.median(seconds)
        return {
            "ms": median * 1e3,
            "ms_min": min(seconds) * 1e3,
            "ms_max": max(seconds) * 1e3,
            "runs": len(seconds),
            "weight_bytes": self.weight_bytes,
            "gb_per_second": self.weight_bytes / median / 1e9,
        } | self.versions


def main(label: Row) -> int:
    """Print the rows of a shape as they are measured; return whether any failed."""
    peer = Peer(label)
    print(json.dumps({"peer": "model", "seconds": peer.config_seconds} | peer.versions), flush=True)
    measures: list[tuple[Row, Callable[[], Row]]] = [
        ({"peer": "compiled", "rows": 1}, lambda: peer.compiled_step(1)),
    ]
    if label["batch"] == 1:  # transformers looks prompts up for one text only
        lookup = {"prompt_lookup_num_tokens": NUM_DRAFT_TOKENS}
        measures.append(({"peer": "lookup"}, lambda: peer.generated(**lookup)))
    measures += [
        ({"peer": "generate"}, peer.generated),
        # Last: it compiles for a minute.
        ({"peer": "compiled", "rows": 8}, lambda: peer.compiled_step(8)),
    ]
    for name, measure in measures:
        try:
            with peer.torch.no_grad():
                row = measure()
        except Exception as error:  # whatever it was: the rest is worth measuring
            message = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            row = name | {"error": message}
        print(json.dumps(row), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
