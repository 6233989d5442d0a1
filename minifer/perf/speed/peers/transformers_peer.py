"""transformers' `generate`: one batch of prompts of equal length, decoded in step.

Chosen for speed: its cache, PyTorch's fused attention, greedy with nothing computed for the
output's sake. options: arguments of `from_pretrained`.
"""

import importlib
import os
import time

os.environ.setdefault("HF_HUB_OFFLINE", "1")


def versions():
    from importlib.metadata import version

    importlib.import_module("transformers")
    return {"transformers": version("transformers"), "torch": version("torch")}


class Peer:
    def __init__(self, job):
        self._torch = torch = importlib.import_module("torch")
        self._transformers = transformers = importlib.import_module("transformers")
        torch.set_num_threads(job["threads"])
        options = {"attn_implementation": "sdpa", **job["options"]}
        load = transformers.AutoModelForCausalLM.from_pretrained
        self._model = load(job["model"], dtype=getattr(torch, job["dtype"]), **options).eval()
        self._model.generation_config.eos_token_id = None  # nothing ends early
        self._model.generation_config.pad_token_id = 0
        self.dtype = str(self._model.dtype).replace("torch.", "")
        self.config = {**options, "threads": torch.get_num_threads()}

    def run(self, requests):
        lengths = {(len(r["prompt"]), r["max_tokens"]) for r in requests}
        if len(lengths) != 1:
            raise ValueError("transformers' generate takes requests of one length, got several")
        ((_, count),) = lengths
        arrived = []

        class Watch(self._transformers.generation.streamers.BaseStreamer):
            def put(self, value):
                arrived.append(time.perf_counter())

            def end(self):
                pass

        # A streamer refuses batches, so the clock is read where each step's logits pass by.
        def clock(ids, logits):
            arrived.append(time.perf_counter())
            return logits

        ids = self._torch.tensor([r["prompt"] for r in requests])
        generate = {
            "attention_mask": self._torch.ones_like(ids),
            "do_sample": False,
            "max_new_tokens": count,
            "min_new_tokens": count,
            "use_cache": True,
        }
        if len(requests) == 1:
            generate["streamer"] = Watch()
        else:
            generate["logits_processor"] = self._transformers.LogitsProcessorList([clock])
        with self._torch.inference_mode():
            started = time.perf_counter()
            out = self._model.generate(ids, **generate)
        if len(requests) == 1:
            arrived = arrived[1:]  # the streamer is given the prompt first
        tokens = out[:, ids.shape[1] :].tolist()
        return started, [list(arrived) for _ in requests], tokens, {}
