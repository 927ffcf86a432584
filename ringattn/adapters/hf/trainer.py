"""Overrides of transformers' Trainer, accelerate's Accelerator and trl's SFTTrainer."""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ...training import batch as batches
from ...training import loss as losses
from ...transport import group as transports
from ...virtual import VirtualRank
from ..in_place import Block
from ..recomputation import Scope
from ..replacing import replaced
from . import grpo
from .active import SEQUENCES
from .called import attending, run
from .models import shifts, unwrapped
from .sequence import Sequence
from .versions import needed, tried, version
from .whole_rows import whole_rows

_log = logging.getLogger(__name__)

Hooks = dict[str, tuple[str, ...]]  # methods that the mixin overrides, and the parameters that it relies on
_TRAINER_HOOKS: Hooks = {
    "create_accelerator_and_postprocess": (),
    "_set_signature_columns_if_needed": (),
    "get_batch_samples": ("epoch_iterator", "num_batches", "device"),
    "prediction_step": ("model", "inputs", "prediction_loss_only", "ignore_keys"),
    "_get_num_items_in_batch": ("batch_samples", "device"),
    "_prepare_context_parallel_inputs": ("model", "inputs"),
}
_ACCELERATOR_HOOKS: Hooks = {"_prepare_cp": ("args",)}
_TRL_HOOKS: Hooks = {
    "compute_loss": ("model", "inputs", "return_outputs", "num_items_in_batch"),
    "prediction_step": ("model", "inputs", "prediction_loss_only", "ignore_keys"),
}
# Trainers of trl whose losses compare rows, and what they override further.
_OF_ROWS: dict[str, Hooks] = {
    "DPOTrainer": {"compute_ref_log_probs": ("model", "inputs")},
    "KTOTrainer": {"compute_ref_log_probs": ("model", "inputs")},
    "RewardTrainer": {},
    "GRPOTrainer": {
        "_compute_loss": ("model", "inputs"),
        "_generate": ("prompts",),
        "_generate_and_score_completions": ("inputs",),
        "_generate_single_turn": ("prompt_ids",),
    },
}


def check_hooks(trainer: type, accelerator: type, of_trl: type | None = None) -> None:
    """Check that the methods that :class:`RingTrainerMixin` and :func:`prepare` override exist, with their parameters.

    Raises:
        RuntimeError: naming the method and the installed versions.
    """
    expected: list[tuple[type, Hooks]] = [(trainer, _TRAINER_HOOKS), (accelerator, _ACCELERATOR_HOOKS)]
    if of_trl:
        expected.append((of_trl, _TRL_HOOKS | _OF_ROWS.get(of_trl.__name__, {})))
    for owner, hooks in expected:
        for method, parameters in hooks.items():
            function = inspect.getattr_static(owner, method, None)
            names = tuple(inspect.signature(function).parameters)[1:] if callable(function) else None
            if names is None or names[: len(parameters)] != parameters:
                _refuse_versions(
                    f"overrides {owner.__name__}.{method}({', '.join(parameters)})",
                    "no such method" if names is None else f"({', '.join(names)})",
                )
    of_tokens = of_trl is not None and of_trl.__name__ != "RewardTrainer"
    if of_trl and of_tokens and not hasattr(sys.modules[of_trl.__module__], "add_fused_lm_head"):
        reliance = f"relies on {of_trl.__name__} adding up one log-probability per target"
        _refuse_versions(reliance, "a loss of another kind")


def _refuse_versions(reliance: str, difference: str) -> None:
    packages = [f"{name} {version(name)}" for name in ("transformers", "accelerate", "trl") if name in sys.modules]
    raise RuntimeError(
        f"ringattn.hf {reliance}, but {' with '.join(packages)} has {difference}; use "
        f"{tried('transformers', 'accelerate', 'trl')}, or ringattn.hf.sequence() in a loop of your own"
    )


def _trainer_of_trl(trainer: type) -> Any:
    """Return the trainer of trl that the class extends, or None.

    Raises:
        NotImplementedError: it is none of those that ringattn supports.
    """
    of_trl = [c for c in trainer.__mro__ if c.__module__.split(".")[0] == "trl"]
    if of_trl and of_trl[0].__name__ not in ("SFTTrainer", *_OF_ROWS):
        raise NotImplementedError(
            f"of trl's trainers ringattn supports SFTTrainer, {', '.join(_OF_ROWS)}, and not {of_trl[0].__name__}; "
            "write a loop with ringattn.hf.sequence(), ringattn.loss.log_probs and, for losses of whole rows, "
            "ringattn.loss.row_sums"
        )
    return [c for c in of_trl if c.__name__ == of_trl[0].__name__][-1] if of_trl else None


def prepare(accelerator: Any) -> Any:
    """Let an ``accelerate.Accelerator`` with ``cp_size > 1`` make the mesh, place the data and shard the parameters,
    but leave attention to ringattn: its own context parallelism erases masks and refuses windows.

    Returns the same object, with a subclass as its class."""
    base = type(accelerator)
    if not issubclass(base, _LeavesAttention):
        check_hooks(needed("transformers", "Trainer"), base)
        accelerator.__class__ = type(base.__name__, (_LeavesAttention, base), {})
    return accelerator


class _LeavesAttention:
    """An Accelerator whose context parallelism is ringattn's."""

    # What numbers given to gather_for_metrics are on ranks that share a sequence: "parts", sums over the rank's tokens;
    # "equal", of whole rows; "" for neither.
    ring_numbers = ""

    def _prepare_cp(self, *args: Any) -> tuple[Any, ...]:
        return args

    def gather_for_metrics(self: Any, input_data: Any, use_gather_object: bool = False) -> Any:
        """Gather metrics once per batch: ranks that share a sequence have the same ones, which would count ``cp_size``
        times."""
        sharing = grpo.sharing(self)
        if sharing == 1:
            return super().gather_for_metrics(input_data, use_gather_object)  # type: ignore[misc]
        if isinstance(input_data, tuple):
            return tuple(self.gather_for_metrics(x, use_gather_object) for x in input_data)
        if self.ring_numbers and isinstance(input_data, Tensor) and input_data.ndim == 0:
            numbers = self.gather(input_data).unflatten(0, (-1, sharing))
            return numbers.sum(1) if self.ring_numbers == "parts" else numbers[:, 0]
        if not isinstance(input_data, Tensor) or input_data.ndim == 0:
            raise NotImplementedError(
                f"gather_for_metrics() got a {type(input_data).__name__}; under cp_size > 1 it takes a tensor of rows, "
                "the same on all ranks that share a sequence"
            )
        rows = self.gather(input_data).unflatten(0, (self.num_processes, -1))[::sharing].flatten(0, 1)
        state = self.gradient_state
        return rows[: state.remainder] if state.end_of_dataloader and state.remainder > 0 else rows


class RingTrainerMixin:
    """``class MyTrainer(RingTrainerMixin, Trainer)``: the model has ``attn_implementation="ringattn"``, and
    accelerate's ``cp_size`` says how many ranks share a sequence (1 or no mesh: each rank has its own).

    Training loss and gradients, and ``evaluate()``'s loss, are those of one process (of a decoder: one whose labels at
    the first token of each document are -100). ``predict()``, and ``evaluate()`` with ``compute_metrics``, need whole
    logits and are refused. (With ``even_batches``, accelerate fills up a short last batch with rows that it repeats,
    with any attention: pass ``accelerator_config={"even_batches": False}``.)

    The same holds for trl's ``SFTTrainer``, with its metrics (entropy, accuracy, number of tokens), packing,
    padding-free batches and completion-only losses, and for its ``DPOTrainer``, ``KTOTrainer`` and ``RewardTrainer``,
    with all of their losses and metrics. So it does for ``GRPOTrainer``, which generates over the ranks, or gets
    completions from a ``rollout_func``, called on one of them. Other trainers of trl are refused.

    ``ring_options``: options of :func:`sequence`; ``packing="tree"`` for trainers of whole rows (DPO, KTO, GRPO), which
    then compute each prompt of a batch once.
    """

    ring_options: Mapping[str, Any] = {}
    ring_attends = False  # whether models of another attention attend by ringattn
    _ring_inside = False  # of _whole_rows()
    accelerator: Any
    args: Any
    model_accepts_loss_kwargs: bool

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        with contextlib.ExitStack() as self._ring_withheld:
            super().__init__(*args, **kwargs)

    def create_accelerator_and_postprocess(self) -> None:
        of_trl = _trainer_of_trl(type(self))
        check_hooks(needed("transformers", "Trainer"), needed("accelerate", "Accelerator"), of_trl)
        with shared_on_cpus():
            super().create_accelerator_and_postprocess()  # type: ignore[misc]
        prepare(self.accelerator)
        if (
            self.accelerator.num_processes > 1
            and self.accelerator.is_main_process
            and grpo.sharing(self.accelerator) == 1
        ):
            _log.warning(
                "cp_size is 1: rows are not split, and each of %d ranks has its own; pass "
                "TrainingArguments(parallelism_config=ParallelismConfig(cp_size=...)) to share them",
                self.accelerator.num_processes,
            )
        self.gather_function = self.accelerator.gather_for_metrics  # bound to its new class
        self._ring_sft = of_trl is not None and of_trl.__name__ == "SFTTrainer"
        self._ring_rows = "" if of_trl is None or self._ring_sft else of_trl.__name__
        self.accelerator.ring_numbers = "equal" if self._ring_rows else ""
        if self._ring_rows == "GRPOTrainer":
            grpo.extend(self)
        if self._ring_sft:
            # Its __init__ has packed by now. Next it would refuse packing, with which accelerate's own context
            # parallelism lets documents see each other.
            for name in ("packing", "eval_packing"):
                self._ring_withheld.enter_context(replaced(self.args, name, False))

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: Any) -> Any:
        """Shift the targets of whole rows before the Trainer counts them."""
        return super().get_batch_samples(map(self._with_targets, epoch_iterator), num_batches, device)  # type: ignore[misc]

    def _with_targets(self: Any, batch: Any) -> Any:
        if not (self._ring_sft or shifts(unwrapped(self.model))):  # an encoder's targets are its labels
            return batch
        if not isinstance(batch, Mapping) or batch.get("labels") is None or batch.get("shift_labels") is not None:
            return batch
        return {**batch, "shift_labels": batches.shift_labels(batch["labels"], *batches.begins_of(batch))}

    def _set_signature_columns_if_needed(self: Any) -> None:
        """Keep the columns with boundaries of documents, which the model does not know."""
        super()._set_signature_columns_if_needed()  # type: ignore[misc]
        columns = (*batches.BOUNDARIES, "shift_labels")
        self._signature_columns += [name for name in columns if name not in self._signature_columns]

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: Any = None
    ) -> Any:
        if not prediction_loss_only and self._ring_rows != "RewardTrainer":  # whose scores are those of whole rows
            raise NotImplementedError(
                "predict(), and evaluate() with compute_metrics, would get the logits of this rank's tokens only; set "
                "prediction_loss_only=True, or reload the model with attn_implementation='sdpa' in one process"
            )
        if self._ring_rows:
            with self._whole_rows():
                return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)  # type: ignore[misc]
        if inputs.get("labels") is None:
            raise ValueError(
                f"the batch has {', '.join(inputs)} and no labels; evaluation over ranks gives the loss only"
            )
        inputs = self._with_targets(inputs)
        return self._whole_loss(model, inputs), None, None

    def _whole_loss(self: Any, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        """Return the mean over the targets of this batch, as in one process, on every rank that shares it. SFTTrainer's
        own evaluation step does not call :meth:`_prepare_context_parallel_inputs`, nor did the Trainer's always."""
        total = (
            (inputs["shift_labels"] != batches.IGNORE).sum().to(self.accelerator.device)
            if self._ring_sft
            else self._get_num_items_in_batch([inputs], self.accelerator.device)
        )
        active, local = self._prepare_context_parallel_inputs(model, inputs)
        with torch.no_grad(), self.compute_loss_context_manager(), active():
            loss = self.compute_loss(model, local, num_items_in_batch=total)
        if not self._ring_sft:  # its parts have been multiplied by their number
            return losses.reduced(loss, self._ring_group(), wrapper="averages")
        scale = self.accelerator.num_processes // self.get_tp_size()  # by which compute_loss multiplies
        return losses.reduced(loss / scale, self._ring_group(), wrapper="sums")

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        if self._ring_sft and num_items_in_batch is None:
            raise ValueError(f"the batch has {', '.join(inputs)} and no labels to count; SFTTrainer needs them")
        # Inside, SFTTrainer gathers sums over tokens.
        with replaced(self.accelerator, "ring_numbers", "parts" if self._ring_sft else self.accelerator.ring_numbers):
            result = super().compute_loss(  # type: ignore[misc]
                model, inputs, return_outputs=return_outputs, num_items_in_batch=num_items_in_batch
            )
        if self._ring_rows or self.model_accepts_loss_kwargs:
            return result
        world = transports.of(self._ring_group()).world_size
        # The part of this batch's mean: the Trainer has not multiplied it.
        return (result[0] * world, *result[1:]) if return_outputs else result * world

    def _prepare_context_parallel_inputs(self, model: nn.Module, inputs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if self._ring_rows:
            return self._whole_rows, inputs
        self._check_once()
        inputs = self._prepare_inputs(inputs)  # type: ignore[attr-defined]
        sequence = Sequence(model, inputs, self._ring_group(), **self.ring_options)
        if self.model_accepts_loss_kwargs:  # the Trainer's own covers accumulated batches and all ranks
            sequence.local.pop("num_items_in_batch", None)
        return sequence.active, sequence.local

    def compute_ref_log_probs(self, model: nn.Module, inputs: dict[str, Any]) -> Any:
        with self._whole_rows():
            return super().compute_ref_log_probs(model, inputs)  # type: ignore[misc]

    @contextlib.contextmanager
    def _whole_rows(self: Any) -> Iterator[None]:
        """Let the trainer's models be called with whole rows inside of the block."""
        if self._ring_inside:
            yield
            return
        self._check_once()
        models = [self.model, *([self.ref_model] if getattr(self, "ref_model", None) is not None else [])]
        with contextlib.ExitStack() as stack:
            for model in models if self.ring_attends else ():
                stack.enter_context(attending(model))
            stack.enter_context(replaced(self, "_ring_inside", True))
            stack.enter_context(whole_rows(models, self._ring_group(), **self.ring_options))
            yield

    def _ring_group(self) -> Any:
        """Return the ranks that share rows with this one."""
        alone = grpo.sharing(self.accelerator) == 1
        return VirtualRank(0, 1, self.accelerator.device) if alone else self.accelerator.torch_device_mesh["cp"]

    def _check_once(self) -> None:
        if not getattr(self, "_ring_checked", False):
            _check_trainer(self)
            self._ring_checked = True


def over_ranks(stock: type, options: Mapping[str, Any]) -> type:
    """Return a trainer's class with :class:`RingTrainerMixin`, for models of any attention. Where accelerate's
    ``cp_size`` is 1, objects of it become ``stock`` again."""

    class OverRanks(RingTrainerMixin, stock):  # type: ignore[misc, valid-type]
        ring_options = options
        ring_attends = True

        def create_accelerator_and_postprocess(self) -> None:
            config = needed("accelerate", "ParallelismConfig")
            by_launcher = os.environ.get("ACCELERATE_USE_PARALLELISM_CONFIG", "false").lower() == "true"
            parallel = self.args.parallelism_config or (config() if by_launcher else None)
            if parallel is None or not parallel.cp_enabled:
                self.__class__ = stock  # type: ignore[assignment]
                self.create_accelerator_and_postprocess()
            else:
                super().create_accelerator_and_postprocess()

        def _prepare_context_parallel_inputs(self, model: nn.Module, inputs: dict[str, Any]) -> Any:
            with attending(model):
                active, local = super()._prepare_context_parallel_inputs(model, inputs)

            @contextlib.contextmanager
            def attends() -> Iterator[Any]:
                with attending(model), active() as shards:
                    yield shards

            return attends, local

    OverRanks.__name__, OverRanks.__qualname__ = stock.__name__, stock.__qualname__
    return stock if issubclass(stock, RingTrainerMixin) else OverRanks


@contextlib.contextmanager
def installed(blocks: Scope[Block], options: Mapping[str, Any]) -> Iterator[None]:
    """Run models that are called in a block on whole rows; let Trainers share rows, and Accelerators leave masks to the
    models.

    Args:
        options: of :func:`ringattn.hf.sequence`, for Trainers.
    """
    PreTrainedModel = needed("transformers", "PreTrainedModel")

    def call(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        block = blocks.innermost() if SEQUENCES.current(covered=True) is None else None  # not parts of a model
        return nn.Module.__call__(model, *args, **kwargs) if block is None else run(model, block, args, kwargs)

    def new(stock: type, *args: Any, **kwargs: Any) -> Any:
        return object.__new__(over_ranks(stock, options))

    def plain(stock: type, *args: Any, **kwargs: Any) -> Any:
        return object.__new__(stock)

    with contextlib.ExitStack() as stack:
        stack.enter_context(replaced(PreTrainedModel, "__call__", call))
        with contextlib.suppress(ImportError):
            accelerator = needed("accelerate", "accelerator")

            def attach(model: nn.Module) -> None:  # hooks that drop masks, and refuse windows
                if not any(isinstance(part, PreTrainedModel) for part in model.modules()):
                    theirs(model)

            theirs = accelerator._attach_context_parallel_hooks
            stack.enter_context(replaced(accelerator, "_attach_context_parallel_hooks", attach))
            stack.enter_context(shared_on_cpus())
            trainer = needed("transformers", "Trainer")
            # Python does not forget that a class has had a __new__: without one it would take no arguments.
            stack.callback(setattr, trainer, "__new__", plain)
            trainer.__new__ = new
        yield


@contextlib.contextmanager
def shared_on_cpus() -> Iterator[None]:
    """Let Accelerators be made on CPUs with ``cp_size > 1``, with replicated models (DDP). accelerate refuses it, as
    its own context parallelism needs FSDP2, which it has on GPUs only."""
    config, state = needed("accelerate", "ParallelismConfig"), needed("accelerate", "PartialState")
    theirs, mesh_of = config._validate_accelerator, config.get_device_mesh

    def check(parallel: Any, accelerator: Any) -> None:
        if accelerator.device.type != "cpu" or not parallel.cp_enabled:
            theirs(parallel, accelerator)

    def get_device_mesh(parallel: Any, device_type: str | None = None) -> Any:
        processes = state().num_processes
        if device_type == "cpu" and (parallel.tp_enabled or parallel.sp_enabled):
            raise NotImplementedError(
                f"on CPUs ParallelismConfig has tp_size={parallel.tp_size} and sp_size={parallel.sp_size}; accelerate "
                "runs neither there: leave them at 1"
            )
        if device_type == "cpu" and parallel.cp_enabled and parallel.total_size != processes:
            raise ValueError(
                f"ParallelismConfig has cp_size={parallel.cp_size} and {parallel.total_size} ranks in all, but there "
                f"are {processes} processes; start {parallel.total_size} with torchrun, or change the sizes"
            )
        return mesh_of(parallel, device_type)

    with replaced(config, "_validate_accelerator", check), replaced(config, "get_device_mesh", get_device_mesh):
        yield


def _takes_more(model: nn.Module) -> bool:
    """Return whether the model's forward hands other arguments on to its loss. Many models of images do, and declare
    the opposite, for which the Trainer takes the mean of every batch by itself."""
    return any(p.kind is p.VAR_KEYWORD for p in inspect.signature(unwrapped(model).forward).parameters.values())


def _check_trainer(trainer: Any) -> None:
    """Raise NotImplementedError for settings under which the loss would not be the mean over all targets."""
    args, of_rows, sft = trainer.args, trainer._ring_rows, trainer._ring_sft
    adds_up = not of_rows  # over tokens; of rows trl computes the loss
    over_batches = trainer.model_accepts_loss_kwargs
    for refused, setting, fix in (
        (adds_up and not args.average_tokens_across_devices, "average_tokens_across_devices=False", "set it to True"),
        (adds_up and trainer.label_smoother is not None, "label_smoothing_factor", "set it to 0"),
        (trainer.compute_loss_func is not None, "compute_loss_func", "leave the loss to the model"),
        (
            adds_up and not (over_batches or _takes_more(trainer.model)),
            "a model whose forward takes no loss arguments",
            "use ringattn.hf.sequence() and ringattn.loss in a loop of your own",
        ),
        (of_rows and args.torch_compile, f"torch_compile=True on trl's {of_rows}", "set it to False"),
        (
            sft and args.use_liger_kernel,
            "use_liger_kernel=True on trl's SFTTrainer",
            "set it to False: SFTTrainer avoids whole logits by itself",
        ),
        (
            adds_up and "packing" in trainer.ring_options,
            f"packing={trainer.ring_options.get('packing')!r} in ring_options, which is of trainers of whole rows",
            "leave it out",
        ),
        (
            sft and not over_batches,
            "a model with accepts_loss_kwargs=False on trl's SFTTrainer, which takes the mean of each rank's targets",
            "use transformers' Trainer",
        ),
        (getattr(trainer, "aux_loss_enabled", False), "a router loss (router_aux_loss_coef)", "set it to 0.0"),
        (
            trainer.neftune_noise_alpha is not None and transports.of(trainer._ring_group()).world_size > 1,
            f"neftune_noise_alpha={trainer.neftune_noise_alpha}, which scales noise by the length of a rank's shard",
            "leave it out",
        ),
        (args.n_gpu > 1, f"{args.n_gpu} GPUs in one process", "start one process per GPU with torchrun"),
    ):
        if refused:
            raise NotImplementedError(f"the Trainer has {setting}, with which ranks' losses do not add up; {fix}")
