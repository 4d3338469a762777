"""Every kind of event: what may stand in an event file or travel between nodes."""

from __future__ import annotations

from distdiag.data_event import EpochFed, ModelFed, ScheduleState
from distdiag.event import (
    Collective,
    CollectiveState,
    Exited,
    FileAccess,
    FileClosed,
    Finished,
    GroupCreated,
    Heartbeat,
    HostSynced,
    Observed,
    ProbeDisabled,
    Raised,
    RankStarted,
    Signalled,
    Stacks,
    StepEnd,
    StoreCall,
    TorchLoaded,
)
from distdiag.model_event import (
    ModelPlan,
    ModelState,
    OptimizerState,
    PartialRead,
    SliceSaved,
)

AnyEvent = (
    RankStarted
    | TorchLoaded
    | GroupCreated
    | Collective
    | CollectiveState
    | StepEnd
    | Raised
    | Signalled
    | Finished
    | ProbeDisabled
    | Heartbeat
    | Exited
    | Stacks
    | Observed
    | FileAccess
    | FileClosed
    | StoreCall
    | HostSynced
    | ModelPlan
    | ModelState
    | OptimizerState
    | PartialRead
    | SliceSaved
    | EpochFed
    | ModelFed
    | ScheduleState
)
