"""One stage alone: runs planned steps with random activations as fast as it can. Started by ``replay.StageProcesses``.

On standard input one JSON object a line, each answered with one: ``{"load": PATH}`` reads steps, ``{"run": true}`` runs
them on fresh rows and tells when each was done.
"""

import json
import logging
import os
import sys
import time
from collections import deque
from pathlib import Path

import torch
from torch import Tensor

from ipc.errors import EngineError
from ipc.messages import KVCacheConfig, ModelRunnerOutput, SchedulerOutput
from scripts.bench.replay import StageJob, read_steps
from worker.model_config import read_model_config
from worker.model_runner import ModelRunner
from worker.settings import WorkerSettings
from worker.startup import LoadedStage, load_stage, make_caches
from worker.topology import Topology

Steps = list[tuple[SchedulerOutput, ModelRunnerOutput]]


class LoneStage:
    """A stage with weights and cache, and activations for the largest step."""

    def __init__(self, job: StageJob) -> None:
        self._job = job
        self._config = read_model_config(job.model)
        self._topology = Topology(rank=job.stage, num_stages=job.num_stages)
        settings = self._settings()
        self.loaded: LoadedStage = load_stage(settings, self._topology)
        self._caches = make_caches(settings, self.loaded, KVCacheConfig(
            core_id=0, epoch=1, num_blocks=job.num_blocks, block_size=job.block_size, max_model_len=job.max_model_len,
            groups=self.loaded.kv_groups,
        ))  # fmt: skip
        shape = (job.max_num_batched_tokens, self._config.hidden_size)
        generator = torch.Generator().manual_seed(job.stage)
        self._activations = torch.randn(shape, generator=generator).to(self.loaded.dtype)

    def run(self, steps: Steps) -> list[float]:
        """Seconds from the start to the end of each step, which are those of a new epoch."""
        runner = self.runner()
        is_first, is_last = self._topology.is_first, self._topology.is_last
        returned: deque[ModelRunnerOutput] = deque()
        ends = []
        start = time.perf_counter()
        for plan, output in steps:
            batch = runner.prepare(plan)
            if is_first and not is_last:
                while returned and returned[0].step_id <= plan.needs_tokens_of_step:
                    _accept(runner, returned.popleft())
                returned.append(output)
            result = runner.execute_model(batch, self._received(batch.num_tokens))
            if is_last:
                sampled = runner.sample_tokens(batch, result)
                if is_first:
                    _accept(runner, sampled)
            ends.append(time.perf_counter() - start)
        return ends

    def runner(self) -> ModelRunner:
        """A new one, to which no row is known yet; its steps begin anew."""
        job, loaded = self._job, self.loaded
        return ModelRunner(
            loaded.model,
            loaded.backend,
            self._caches,
            config=self._config,
            is_first=self._topology.is_first,
            is_last=self._topology.is_last,
            device=loaded.device,
            dtype=loaded.dtype,
            num_rows=2 * job.max_num_seqs,
            max_model_len=job.max_model_len,
            block_size=job.block_size,
        )

    def _received(self, num_tokens: int) -> Tensor | None:
        return None if self._topology.is_first else self._activations[:num_tokens]

    def _settings(self) -> WorkerSettings:
        job = self._job
        return WorkerSettings(
            model=job.model,
            config=self._config,
            partition=job.partition,
            rank=job.stage,
            world_size=job.num_stages,
            local_rank=job.stage,
            local_world_size=job.num_stages,
            core_address="",
            key="",
            run_dir="",
            device="cpu",
            dtype=job.dtype,
            max_num_seqs=job.max_num_seqs,
            max_num_batched_tokens=job.max_num_batched_tokens,
            block_size=job.block_size,
            num_threads=job.num_threads,
            parent_pid=os.getppid(),
            signal_fd=-1,
        )


def _accept(runner: ModelRunner, output: ModelRunnerOutput) -> None:
    runner.accept_tokens(output.step_id, output.rows, output.token_ids)


def main() -> int:
    """Answer until standard input ends."""
    logging.basicConfig(level=logging.WARNING)
    try:
        stage = LoneStage(StageJob(**json.loads(sys.argv[1])))
    except EngineError as error:
        print(f"stage: {error}", file=sys.stderr)
        return 1
    _say({"ready": True})
    steps: Steps = []
    for line in sys.stdin:
        message = json.loads(line)
        if "load" in message:
            steps = read_steps(Path(message["load"]))
            _say({"num_steps": len(steps)})
        else:
            _say({"ends": stage.run(steps)})
    return 0


def _say(answer: dict[str, object]) -> None:
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    sys.exit(main())
