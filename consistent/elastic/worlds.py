"""Call a training function in one world (set of ranks) after another, in one process (``run``).

```
rank 0   train: build, keep, step 1, 2, 3 ...x                 train: build, keep, step 3, 4 ...
rank 1   train: build, keep, step 1, 2, 3 .. killed
rank 2   train: build, keep, step 1, 2, 3 ...x  next world     train: build, keep, step 3, 4 ...
```

A rank that cannot continue because another rank was lost gets an error out of whatever call of the
library it is in, or makes next: forward, backward, an optimizer's step, a save. ``run`` frees
everything that the step held, and calls the function again once the remaining ranks have their new
world. The function builds its objects again, because an error in the middle of a step leaves them
in any state. ``job.keep`` then restores their contents from the copies of the last finished step.
"""

from __future__ import annotations

import gc
import importlib
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

from mirrored.every_rank import gather_from_ranks
from mirrored.transports.torch_dist import rejoin

from ..checkpoint.save import abandon_running_save
from .job import Job, WorldChanges
from .member import ElasticWorld, Member, Stopped
from .slow import SlowRankDetector

T = TypeVar("T")

_LOSS_NOTICE_S = 0.5  # an error may precede the launcher's message that a rank is gone


def run(
    train: Callable[[Job], T],
    *,
    every: int = 1,
    peers: bool = False,
    timeout: float = 30.0,
    slow: float | None = None,
    slow_steps: int = 10,
    leave_out: bool = False,
) -> T:
    """Call ``train(job)``, and again each time that ranks are lost or join, until it returns.

    ```
    def train(job):
        placement = job.placement({"dp": -1, "fsdp": 2})
        model = consistent.parallelize(GPT(), placement, {"dp": "data", "fsdp": "zero3"})
        optimizer = torch.optim.AdamW(model.parameters())
        batches = consistent.data.loader(data, placement, batch_size=64, shuffle=True)
        job.keep(model=model, optimizer=optimizer, batches=batches)
        for ids, wanted in batches:
            ...
            job.commit()

    consistent.elastic.run(train)       # started by: python -m consistent run --nproc-per-node 4
    ```

    When a rank dies, is suspended for longer than ``timeout``, or its host is gone, all ranks give
    up the step, and the function is called again on the remaining ranks. ``keep`` gives its objects
    the state that they had when the last step was finished, including random numbers and the
    position of the data. So the losses are those of a run without interruption. The processes stay.

    Under torchrun the function is called once, and no copies are kept. There the launcher ends all
    ranks when one dies, and ``keep(folder=...)`` continues after the last checkpoint when the
    launcher starts them again.

    Args:
        train: builds the job, calls ``job.keep`` before its loop and ``job.commit`` after each
            step.
        every: number of steps between two copies. The death of a rank costs at most that many
            steps.
        peers: let each rank also keep the parts of the rank before it that no other rank has. They
            are sent when copies are made.
        timeout: seconds for which a rank waits for others before it gives up.
        slow: a factor by which slow ranks are found: those that work more than ``slow`` times as
            long as the median rank, waiting not counted. They are printed with their hosts. None:
            nothing is measured.
        slow_steps: the number of consecutive slow steps after which a rank is printed.
        leave_out: also end that rank, and continue without it.

    Returns:
        What ``train`` returns, on every rank that has reached its end.

    Raises:
        RuntimeError: this process may not continue; the message says why.
        SystemExit: the program was over before this process joined; its status is 0.
        Exception: an error that ``train`` raises for another reason than a lost rank.
    """
    if every < 1:
        raise ValueError(f"elastic.run: every={every}. Give 1 or more steps.")
    if slow is None and leave_out:
        raise ValueError("elastic.run: leave_out=True without slow. Say what is slow: slow=3.0.")
    if slow is not None and (slow <= 1 or slow_steps < 1):
        raise ValueError(
            f"elastic.run: slow={slow}, slow_steps={slow_steps}. Give more than 1, and 1 or more."
        )
    member = Member.of_this_process()
    slow_detector = None if slow is None else SlowRankDetector(slow, slow_steps)
    goes_on = member is not None
    job = Job(every, peers, slow=slow_detector, leave_out=leave_out, goes_on=goes_on)
    if member is None:
        job.begin(None, lambda: False)
        return train(job)
    return _ElasticRun(train, job, member, timeout).run()


class _ElasticRun:
    """One call of ``run``: enters worlds (sets of ranks) one after another, and trains in each.

    Args:
        train: the training function.
        job: the object that it gets, the same one in each world.
        member: the connection to the launcher.
        timeout: seconds for which a rank waits for others.
    """

    def __init__(self, train: Any, job: Job, member: Member, timeout: float) -> None:
        self._train, self._job, self._member, self._timeout = train, job, member, timeout
        self._results: list[Any] = []  # what ``train`` returned, once it has
        self._failed_at: int | None = None  # the step that was given up last

    def run(self) -> Any:
        """Return what the training function returns in the world in which it reaches its end."""
        # A new rank's first optimizer call would import this, while the other ranks wait for it.
        importlib.import_module("torch._dynamo")
        gc.freeze()  # imported objects are left out of the collection at each change of ranks
        try:
            return self._train_in_worlds()
        finally:
            self._member.close()

    def _train_in_worlds(self) -> Any:
        while True:
            world = self._member.next_world(self._timeout, self._job.recovery)
            if world is None:
                return self._results[0] if self._results else _exit_too_late()
            try:
                if self._train_in(world):
                    self._member.done()
                    return self._results[0]
            finally:
                rejoin.leave()
                gc.collect()
                self._job.recovery.end("to leave the step")

    def _train_in(self, world: ElasticWorld) -> bool:
        """Call the training function in ``world``; return whether all ranks have reached its end.

        If not, the world is over, and the function is to be called again in the next one. Errors of
        the program itself are raised.
        """
        try:
            self._job.begin(world, lambda: self._member.should_leave)
            result = self._train(self._job)
            self._results[:] = [result]
            gather_from_ranks(None)  # a rank that passes this knows that all ranks have a result
            return True
        except WorldChanges as error:
            self._job.recovery.begin(None)
            _free_frames(error)
        # Stopped is an Exception, and must not count as an error of the step.
        except Stopped:
            raise
        except Exception as error:
            reason = self._loss_reason()
            if reason is None or self._is_program_error(world):
                raise
            self._job.recovery.begin(self._member.lost_at)
            if world.rank == 0:
                first_line = str(error).partition("\n")[0]
                print(f"elastic: {first_line}", file=sys.stderr, flush=True)
            abandon_running_save()
            _free_frames(error)
        return False

    def _loss_reason(self) -> str | None:
        """Return why the world is over; None if it goes on, so that an error is the program's own.

        Called after an error. It waits for a moment, because the message of the launcher that a
        rank is lost may come after the error that the loss has caused.
        """
        end = time.monotonic() + _LOSS_NOTICE_S
        while (reason := self._member.end_reason()) is None and time.monotonic() < end:
            time.sleep(0.01)
        return reason

    def _is_program_error(self, world: ElasticWorld) -> bool:
        """Return whether an error is the program's own, so that another try cannot help.

        True if the last error was in the same step, and no rank was lost or joined in between.
        """
        is_repeated = self._failed_at == self._job.step and not world.losses and not world.new_ranks
        self._failed_at = self._job.step
        return is_repeated


def _exit_too_late() -> NoReturn:
    """End a process that joined after the program was over, with status 0 and a message."""
    message = "elastic: the program was over on the other ranks before this one came."
    print(message, file=sys.stderr, flush=True)
    raise SystemExit(0)


def _free_frames(error: BaseException) -> None:
    """Free what the frames of an error hold: the model, and the autograd graph of a step.

    Called before the ranks enter their next world, so that memory does not hold two models.
    """
    current: BaseException | None = error
    while current is not None:
        traceback.clear_frames(current.__traceback__)
        previous = current.__context__ or current.__cause__
        current.__traceback__, current.__context__, current.__cause__ = None, None, None
        current = previous
