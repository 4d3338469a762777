"""Every kind of event: what may stand in an event file or travel between nodes."""

from __future__ import annotations

from distdiag.events.checkpoints import (
    LoadWasted,
    StateRestored,
    StateSaved,
    TrainingResumed,
    WeightsLoaded,
)
from distdiag.events.collectives import Collective, CollectiveState, GroupCreated
from distdiag.events.data import EpochFed, ModelFed, RowsGathered, ScheduleState
from distdiag.events.files import FileAccess, FileClosed, HostSynced, StoreCall
from distdiag.events.gradients import GradientSums
from distdiag.events.lifecycle import (
    Exited,
    Finished,
    Heartbeat,
    Monitored,
    NodeLost,
    ProbeDisabled,
    ProcessesSpawned,
    Raised,
    RankStarted,
    Signalled,
    StepEnd,
    SteppedAlone,
    TorchLoaded,
    Unobserved,
)
from distdiag.events.losses import LossWeights
from distdiag.events.models import (
    ModelPlan,
    ModelState,
    OptimizerState,
    PartialRead,
    PlanPatterns,
    SliceSaved,
)
from distdiag.events.random import RandomDraw, RandomState
from distdiag.events.routing import AuxLoss, CounterWritten, CountsHeld, Routing, TokensExchanged
from distdiag.events.sequences import (
    AttentionUnread,
    SequenceUnverified,
    SequenceUse,
    TokenPassport,
)
from distdiag.events.stacks import Observed, Stacks

AnyEvent = (
    RankStarted
    | TorchLoaded
    | GroupCreated
    | ProcessesSpawned
    | Collective
    | CollectiveState
    | StepEnd
    | SteppedAlone
    | Raised
    | Signalled
    | Finished
    | ProbeDisabled
    | Unobserved
    | Heartbeat
    | Exited
    | Stacks
    | Observed
    | Monitored
    | FileAccess
    | FileClosed
    | StoreCall
    | HostSynced
    | NodeLost
    | ModelPlan
    | ModelState
    | OptimizerState
    | PartialRead
    | SliceSaved
    | PlanPatterns
    | RandomState
    | RandomDraw
    | LossWeights
    | WeightsLoaded
    | LoadWasted
    | StateSaved
    | StateRestored
    | TrainingResumed
    | EpochFed
    | ModelFed
    | ScheduleState
    | RowsGathered
    | TokenPassport
    | SequenceUnverified
    | SequenceUse
    | AttentionUnread
    | Routing
    | CounterWritten
    | TokensExchanged
    | CountsHeld
    | AuxLoss
    | GradientSums
)
