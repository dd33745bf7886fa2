"""The mathematics and the policy of the demo's trainer."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from examples.grpo.train import GrpoSettings, Policy, grpo_loss, token_logprobs  # noqa: E402
from examples.ledger import Ledger  # noqa: E402
from forebay_ops.tiny_model import create_tiny_model  # noqa: E402

SETTINGS = GrpoSettings(entropy_bonus=0.0)


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model."""
    return create_tiny_model(tmp_path_factory.mktemp("model") / "tiny", seed=0)


def _batch(policy: Policy, rewards: list[float]) -> dict[str, Any]:
    """One row per reward, alike but for the last token of the completion; the second half of the ids is padding."""
    prompt, rows = [15, 16, 4, 5, 6, 7, 17], len(rewards)
    ids = torch.tensor([[*prompt, 4, 5, 6 + row, 0, 0] for row in range(rows)], dtype=torch.int32)
    attention = torch.arange(ids.shape[1]) < len(prompt) + 3
    attention = attention.expand(rows, -1)
    mask = attention.clone()
    mask[:, : len(prompt)] = False
    with torch.no_grad():
        served = token_logprobs(policy.model, ids.long(), attention)[0] * mask
    return {
        "input_ids": ids,
        "attention_mask": attention,
        "loss_mask": mask.int(),
        "logprobs": served,
        "rewards": torch.tensor(rewards),
        "original_rewards": torch.tensor(rewards),
    }


def _completion_logprobs(policy: Policy, batch: dict[str, Any]) -> Any:
    with torch.no_grad():
        logprobs, _ = token_logprobs(policy.model, batch["input_ids"].long(), batch["attention_mask"])
    return (logprobs * batch["loss_mask"]).sum(1)


def test_rewarded_completion_becomes_likelier(model_folder: Path) -> None:
    """A step raises what had a positive advantage, lowers what had a negative one, and counts as a version."""
    policy = Policy(model_folder, SETTINGS)
    batch = _batch(policy, [1.0, -1.0])
    before = _completion_logprobs(policy, batch)
    policy.train_on(batch, torch.tensor([0, 0]))
    moved = _completion_logprobs(policy, batch) - before
    assert moved[0] - moved[1] > 0.01
    assert policy.version == 1


def test_equal_rewards_leave_the_loss_without_gradient(model_folder: Path) -> None:
    """Advantages of zero, which is what equal rewards are normalized to, teach nothing."""
    policy = Policy(model_folder, SETTINGS)
    batch = _batch(policy, [0.0, 0.0])
    logprobs, entropy = token_logprobs(policy.model, batch["input_ids"].long(), batch["attention_mask"])
    grpo_loss(logprobs, entropy, batch, SETTINGS).loss.backward()
    assert all(not parameter.grad.any() for parameter in policy.model.parameters() if parameter.grad is not None)


@pytest.mark.parametrize("broken", [float("-inf"), -50.0, 0.0])
def test_padding_and_prompt_are_never_trained_on(broken: float) -> None:
    """Whatever stands outside the loss mask changes neither the loss nor a gradient."""
    mask = torch.tensor([[0, 0, 1, 1, 0]])
    served = torch.tensor([[0.0, 0.0, -1.0, -2.0, 0.0]])
    batch = {"loss_mask": mask, "logprobs": served, "rewards": torch.tensor([1.5])}
    clean = torch.tensor([[0.0, 0.0, -1.1, -1.9, 0.0]], requires_grad=True)
    dirty = torch.where(mask.bool(), clean.detach(), broken).requires_grad_()
    losses = [grpo_loss(logprobs, torch.zeros(1, 5), batch, SETTINGS).loss for logprobs in (clean, dirty)]
    for loss in losses:
        loss.backward()
    assert losses[0].item() == losses[1].item()
    assert torch.equal(clean.grad, dirty.grad)
    assert torch.equal(dirty.grad != 0, mask.bool())


def test_padding_changes_no_logprob(model_folder: Path) -> None:
    """The same row has the same logprobs however far its batch is padded."""
    policy = Policy(model_folder, SETTINGS)
    batch = _batch(policy, [1.0])
    ids, attention = batch["input_ids"].long(), batch["attention_mask"]
    real = int(attention.sum())
    with torch.no_grad():
        padded = token_logprobs(policy.model, ids, attention)
        alone = token_logprobs(policy.model, ids[:, :real], attention[:, :real])
    for long, short in zip(padded, alone, strict=True):
        torch.testing.assert_close(long[:, :real], short, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("ratio", "advantage", "trained"),
    [
        (1.0, 1.0, True),
        (1.27, 1.0, True),
        (1.29, 1.0, False),  # likelier by enough already
        (0.5, 1.0, True),  # it got less likely although it was good: bring it back
        (0.81, -1.0, True),
        (0.79, -1.0, False),  # less likely by enough already
        (2.0, -1.0, True),
    ],
)
def test_clipping(ratio: float, advantage: float, trained: bool) -> None:
    """The ratio counts from 0.8 to 1.28; beyond, in the direction of the advantage, a token gives no gradient."""
    served = torch.tensor([[-1.0]])
    logprobs = (served + torch.tensor(ratio).log()).requires_grad_()
    batch = {"loss_mask": torch.tensor([[1]]), "logprobs": served, "rewards": torch.tensor([advantage])}
    result = grpo_loss(logprobs, torch.zeros(1, 1), batch, SETTINGS)
    result.loss.backward()
    assert bool(logprobs.grad.any()) is trained
    assert result.clipped == (0.0 if trained else 1.0)


def test_loss_is_a_mean_over_tokens() -> None:
    """Every trained token weighs the same, in long rows and in short ones."""
    batch = {
        "loss_mask": torch.tensor([[1, 1, 1], [1, 0, 0]]),
        "logprobs": torch.zeros(2, 3),
        "rewards": torch.tensor([1.0, -2.0]),
    }
    zeros = torch.zeros(2, 3)
    assert grpo_loss(zeros, zeros, batch, SETTINGS).loss.item() == pytest.approx(-(3 * 1.0 - 2.0) / 4)


def test_entropy_is_worth_its_bonus_on_trained_tokens_only() -> None:
    """The mean entropy of the trained tokens, times the bonus, lowers the loss."""
    batch = {"loss_mask": torch.tensor([[0, 1, 1]]), "logprobs": torch.zeros(1, 3), "rewards": torch.tensor([0.0])}
    entropy = torch.tensor([[9.0, 1.0, 2.0]])
    result = grpo_loss(torch.zeros(1, 3), entropy, batch, GrpoSettings(entropy_bonus=0.1))
    assert result.loss.item() == pytest.approx(-0.15)


def test_entropy_of_the_untrained_model_is_nearly_that_of_chance(model_folder: Path) -> None:
    """Random weights choose among twenty symbols nearly evenly: the entropy is close to log 20."""
    policy = Policy(model_folder, SETTINGS)
    batch = _batch(policy, [1.0])
    with torch.no_grad():
        _, entropy = token_logprobs(policy.model, batch["input_ids"].long(), batch["attention_mask"])
    assert float(entropy[:, 1:].mean()) == pytest.approx(math.log(20), abs=0.1)


def test_minibatches_hold_whole_groups(model_folder: Path) -> None:
    """In each epoch every row is seen once, together with the rest of its group."""
    policy = Policy(model_folder, GrpoSettings(minibatches=2, epochs=2))
    group_index = torch.arange(6).repeat_interleave(3)
    parts = list(policy._minibatches(group_index))
    assert len(parts) == 4
    assert sorted(torch.cat(parts[:2]).tolist()) == sorted(torch.cat(parts[2:]).tolist()) == list(range(18))
    for rows in parts:
        _, counts = group_index[rows].unique(return_counts=True)
        assert set(counts.tolist()) == {3}


def test_saved_versions_load_and_old_ones_go(model_folder: Path, tmp_path: Path) -> None:
    """A saved version is a model folder with the weights of that moment; only the last ones stay, none half-written."""
    policy = Policy(model_folder, SETTINGS)
    batch = _batch(policy, [1.0, -1.0])
    for _ in range(5):
        policy.train_on(batch, torch.tensor([0, 0]))
        folder = policy.save(tmp_path, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["4", "5"]
    loaded = Policy(folder, SETTINGS)
    torch.testing.assert_close(loaded.model.state_dict(), policy.model.state_dict(), atol=0, rtol=0)


class _Books:
    """A client that only counts."""

    def __init__(self) -> None:
        self.in_flight = self.next_id = 0

    def status(self) -> SimpleNamespace:
        return SimpleNamespace(in_flight=self.in_flight)

    def submit(self) -> int:
        self.in_flight += 1
        self.next_id += 1
        return self.next_id


def _status(**values: Any) -> Any:
    counts = {"rejected": values.pop("rejected", 0), "evicted": values.pop("evicted", 0)}
    return SimpleNamespace(**{"in_flight": 0, "ready": 0, "cut": 0, **values}, count=counts.__getitem__)


def _delivered(batch_id: int, *tasks: int) -> Any:
    return SimpleNamespace(batch_id=batch_id, groups=[SimpleNamespace(task=task) for task in tasks])


def test_ledger_keeps_as_many_in_flight_as_wanted() -> None:
    """Topping up submits what is missing, and nothing where there is enough."""
    books: Any = _Books()
    ledger = Ledger(books.submit)
    ledger.top_up(books, 5)
    ledger.top_up(books, 3)
    assert ledger.submitted == {1, 2, 3, 4, 5}
    books.in_flight -= 2
    ledger.top_up(books, 5)
    assert ledger.submitted == {1, 2, 3, 4, 5, 6, 7}


def test_ledger_finds_lost_and_duplicated_groups() -> None:
    """A group that nothing accounts for is lost; one that came in two batches is a duplicate."""
    books: Any = _Books()
    ledger = Ledger(books.submit)
    ledger.top_up(books, 8)
    ledger.deliver(_delivered(1, 1, 2))
    ledger.deliver(_delivered(2, 2, 3))
    account = ledger.account(_status(rejected=1, evicted=1, in_flight=2, ready=1))
    assert account == {"submitted": 8, "accepted": 4, "rejected": 1, "evicted": 1, "lost": 1, "duplicated": 1}
