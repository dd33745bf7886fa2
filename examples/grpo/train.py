"""A complete GRPO trainer in one file: read a batch, take a gradient step, push the weights, again.

What the pipeline does for it: groups of rollouts of one prompt arrive together, their rewards already normalized within
the group (``reward_normalization=True`` on submit), so ``batch["rewards"]`` *are* the advantages of GRPO and
``batch["original_rewards"]`` what the reward function said. Rollouts may be one version behind the policy that is
trained (``max_staleness``); the logprobs that the server reported when it sampled correct for that through the ratio.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional

from examples.grpo.task import MAX_NEW_TOKENS, copy_prompts, copy_reward
from examples.ledger import Ledger
from forebay import GenerationHyperparameters
from forebay.errors import CollectorUnavailableError, StallError, WeightUpdateError
from forebay_workers.workflows import RLVRWorkflow

if TYPE_CHECKING:
    from forebay import Batch, BatchStream, Client

__all__ = ["GrpoSettings", "Loss", "Policy", "Step", "Watcher", "grpo_loss", "token_logprobs", "train"]

STALL_S = 10.0
"""A batch takes a second or two. After this long without one, look whether something can be done."""
PATIENCE_S = 120.0
"""How long to wait for what should come by itself: a process that is started again, a batch. Then it is an error."""


@dataclass(frozen=True, slots=True)
class GrpoSettings:
    """Hyperparameters of the trainer."""

    learning_rate: float = 1e-3
    """At the start; it falls evenly, so that the policy settles."""
    last_learning_rate: float = 2e-4
    """After `steps` batches."""
    steps: int = 120
    betas: tuple[float, float] = (0.9, 0.95)
    clip_low: float = 0.2
    """The ratio counts down to ``1 - clip_low``..."""
    clip_high: float = 0.28
    """...and up to ``1 + clip_high``: a little more, so that unlikely good tokens may grow."""
    entropy_bonus: float = 0.05
    """Worth of a nat of entropy per token. Without it a policy may stop trying a symbol before it has learnt where the
    symbol belongs, and then never learns it."""
    max_grad_norm: float = 1.0
    minibatches: int = 1
    """Optimizer steps in one pass over a batch; each sees whole groups."""
    epochs: int = 4
    """Passes over a batch."""


# -- the mathematics ---------------------------------------------------------------------------------------------------


def token_logprobs(model: Any, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probability of each token given those before it, and the entropy of that choice in nats, both [B, S].

    0 for the first token, which nothing predicts.
    """
    logits = model(input_ids=input_ids, attention_mask=attention_mask).logits[:, :-1]
    choices = torch.log_softmax(logits.float(), dim=-1)
    logprobs = choices.gather(-1, input_ids[:, 1:, None]).squeeze(-1)
    entropy = -(choices.exp() * choices).sum(dim=-1)
    return functional.pad(logprobs, (1, 0)), functional.pad(entropy, (1, 0))


@dataclass(frozen=True, slots=True)
class Loss:
    """The loss and what one wants to know about it."""

    loss: Tensor
    """Mean over the trained tokens of the whole batch, a scalar."""
    clipped: float
    """Share of trained tokens whose ratio was cut, so that they give no gradient."""
    divergence: float
    """Mean of ``(ratio - 1) - log(ratio)``: an estimate of KL(served || trained), nats per token."""


def grpo_loss(logprobs: Tensor, entropy: Tensor, batch: dict[str, Tensor], settings: GrpoSettings) -> Loss:
    """The clipped surrogate of GRPO, without a KL term, and an entropy bonus; averaged over tokens.

    Args:
        logprobs: of the policy that is trained, [B, S], with gradient.
        entropy: of the same, [B, S], with gradient.
        batch: ``loss_mask`` [B, S] marks generated tokens, ``logprobs`` [B, S] are as served, ``rewards`` [B] are
            the advantages.
        settings: the clip range and the bonus.
    """
    mask = batch["loss_mask"].bool()
    # Where nothing was generated both sides mean nothing: keep them out before exp can make them infinite.
    log_ratio = torch.where(mask, logprobs - batch["logprobs"], 0.0)
    ratio = log_ratio.exp()
    advantages = batch["rewards"][:, None]
    clipped_ratio = ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    objective = torch.minimum(ratio * advantages, clipped_ratio * advantages) + settings.entropy_bonus * entropy
    tokens = mask.sum().clamp(min=1)
    loss = -torch.where(mask, objective, 0.0).sum() / tokens
    with torch.no_grad():
        cut = mask & (clipped_ratio * advantages < ratio * advantages)
        divergence = (ratio - 1 - log_ratio).sum() / tokens
    return Loss(loss, float(cut.sum() / tokens), float(divergence))


# -- the policy --------------------------------------------------------------------------------------------------------


class Policy:
    """The model that is trained, its optimizer, and its version: how many batches it has been trained on."""

    def __init__(self, folder: Path, settings: GrpoSettings, *, seed: int = 0) -> None:
        import transformers

        loader: Any = transformers.AutoModelForCausalLM
        self.model = loader.from_pretrained(folder, dtype=torch.float32)
        self.version = 0
        self.folder: Path | None = None
        """Where the present version was saved; None before the first step."""
        self._model_folder = folder
        self.settings = settings
        self._shuffle = torch.Generator().manual_seed(seed)
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=settings.learning_rate, betas=settings.betas)
        share = settings.last_learning_rate / settings.learning_rate
        self._schedule = torch.optim.lr_scheduler.LinearLR(self._optimizer, 1.0, share, settings.steps)

    def train_on(self, batch: dict[str, Tensor], group_index: Tensor) -> Loss:
        """Train on `batch`, the tensors of contract section 3; `group_index` [B] says which group each row is of.

        Returns the loss of the last optimizer step, for which the policy has moved furthest from the one that sampled.
        """
        results = [
            self._optimizer_step({name: value[rows] for name, value in batch.items()})
            for rows in self._minibatches(group_index)
        ]
        self._schedule.step()
        self.version += 1
        return results[-1]

    def _minibatches(self, group_index: Tensor) -> Iterator[Tensor]:
        """Row numbers of each mini-batch. Groups stay whole: their advantages balance each other."""
        for _ in range(self.settings.epochs):
            order = torch.randperm(int(group_index.max()) + 1, generator=self._shuffle)
            for groups in order.chunk(self.settings.minibatches):
                yield torch.isin(group_index, groups).nonzero().squeeze(-1)

    def _optimizer_step(self, part: dict[str, Tensor]) -> Loss:
        logprobs, entropy = token_logprobs(self.model, part["input_ids"].long(), part["attention_mask"])
        result = grpo_loss(logprobs, entropy, part, self.settings)
        self._optimizer.zero_grad()
        result.loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.max_grad_norm)
        self._optimizer.step()
        return result

    def save(self, versions: Path, *, keep: int = 3) -> Path:
        """Write the weights to ``versions/<version>``, which a server can load, and remove all but the last `keep`.

        Whole or not at all: the folder is written under another name and renamed.
        """
        scratch, folder = versions / f".{self.version}.tmp", versions / str(self.version)
        scratch.mkdir(parents=True)
        try:
            shutil.copy(self._model_folder / "config.json", scratch)
            save_file(self.model.state_dict(), scratch / "model.safetensors", metadata={"format": "pt"})
            scratch.rename(folder)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        shutil.rmtree(versions / str(self.version - keep), ignore_errors=True)
        self.folder = folder
        return folder


# -- the loop ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Step:
    """What one batch did."""

    number: int
    """1 for the first."""
    reward: float
    """Mean raw reward of the batch's rollouts, as sampled."""
    loss: float
    clipped: float
    divergence: float
    staleness: int
    """Of the batch's oldest token, in versions: how far the policy had moved on since it was sampled."""
    groups: int
    tokens: int
    """Trained tokens."""


class Watcher(Protocol):
    """Is told what happens."""

    def batch_came(self, batch: Batch) -> None:
        """A batch was read; it is trained on now."""

    def step_done(self, step: Step) -> None:
        """The weights of this step are on the servers."""


def train(client: Client, policy: Policy, *, model: Path, versions: Path, seed: int, watcher: Watcher) -> Ledger:
    """Take the policy's steps and return the books of all groups."""
    prompts = copy_prompts(seed)
    workflow_kwargs = {
        "reward_fn": copy_reward,
        "gconfig": GenerationHyperparameters(max_new_tokens=MAX_NEW_TOKENS, temperature=1.0),
        "tokenizer": str(model),
    }

    def submit() -> int:
        return client.submit(next(prompts), RLVRWorkflow, workflow_kwargs, reward_normalization=True)

    trainer = _Trainer(client, policy, Ledger(submit), versions)
    trainer.fill_queue()
    with client.batches("trainer", timeout_s=STALL_S) as stream:
        while trainer.steps_left:
            batch = trainer.next_batch(stream)
            watcher.batch_came(batch)
            trainer.ledger.deliver(batch)
            trainer.fill_queue(besides=batch)  # before the step, so that the workers go on while we train
            watcher.step_done(trainer.step(batch))
            batch.ack()  # only now: a trainer that dies before gets the batch again
        client.end_of_data()
        for batch in stream:  # what was submitted to spare: only for the books
            trainer.ledger.deliver(batch)
            batch.ack()
    return trainer.ledger


class _Trainer:
    """The parts of the loop."""

    def __init__(self, client: Client, policy: Policy, ledger: Ledger, versions: Path) -> None:
        self.ledger = ledger
        self._client = client
        self._policy = policy
        self._versions = versions

    @property
    def steps_left(self) -> int:
        return self._policy.settings.steps - self._policy.version

    def fill_queue(self, *, besides: Batch | None = None) -> None:
        """Keep in flight what may be worked on at once, and the next batch.

        Towards the end no more than is still wanted, besides the batch at hand, and one batch to spare: groups that
        are evicted meanwhile must not leave the last batch incomplete.
        """
        rules = self._client.run_settings
        batches = self.steps_left + (0 if besides else 1)
        self.ledger.top_up(self._client, min(rules.capacity + rules.batch_size, batches * rules.batch_size))

    def next_batch(self, stream: BatchStream) -> Batch:
        """The next batch. A collector or a server that has died is waited for: its supervisor starts it again."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                if (batch := stream.next()) is not None:
                    return batch
            except (CollectorUnavailableError, StallError):
                if time.monotonic() > deadline:
                    raise
            # A server that was started again has its first weights, labelled with their version. What it samples with
            # them is too old to be trained on, and evicted: give it the present ones, and the workers more to do.
            if self._policy.folder is not None:
                self._push(self._policy.folder)
            self.fill_queue()

    def step(self, batch: Batch) -> Step:
        """Train on `batch` and put the new weights on the servers."""
        tensors, policy = batch.tensors(), self._policy
        staleness = max((policy.version - group.head for group in batch.groups if group.head >= 0), default=0)
        result = policy.train_on(tensors, torch.from_numpy(batch.group_index))
        self._push(policy.save(self._versions))
        return Step(
            number=policy.version,
            reward=float(tensors["original_rewards"].mean()),
            loss=float(result.loss.detach()),
            clipped=result.clipped,
            divergence=result.divergence,
            staleness=staleness,
            groups=len(batch.groups),
            tokens=int(tensors["loss_mask"].sum()),
        )

    def _push(self, folder: Path) -> None:
        """Weights to the servers, then the version; a server that is away is waited for."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                self._client.update_weights_from_disk(folder, self._policy.version)
            except WeightUpdateError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.5)
            else:
                return
