"""The name of every key. The scripts build the same names from the prefix (``lua/_lib.lua``).

All keys of a run carry the hash tag ``{experiment/trial}``, and so do arq's own keys, whose job ids begin with it.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Keys"]


@dataclass(frozen=True, slots=True)
class Keys:
    """Key names of one run."""

    run: str

    @property
    def prefix(self) -> str:
        """What every key of the run begins with."""
        return f"forebay:{{{self.run}}}:"

    def _key(self, name: str) -> str:
        return self.prefix + name

    @property
    def settings(self) -> str:
        """String: the run's settings as JSON, published by the collector."""
        return self._key("settings")

    @property
    def state(self) -> str:
        """Hash: version, delivered_ahead, the capacity rule's numbers, sequences, epoch."""
        return self._key("state")

    @property
    def counters(self) -> str:
        """Hash: totals since the run began.

        They only grow, but for ``delivered`` when a batch is set aside as unreadable.
        """
        return self._key("counters")

    @property
    def prompts(self) -> str:
        """Stream: task ids of submitted groups that wait to start."""
        return self._key("prompts")

    @property
    def prompts_direct(self) -> str:
        """Stream: the same of groups that are asked for by their task id, evaluations among them."""
        return self._key("prompts:direct")

    @property
    def running(self) -> str:
        """Set: task ids whose slots run."""
        return self._key("running")

    @property
    def running_direct(self) -> str:
        """Set: the same of groups that are asked for by their task id."""
        return self._key("running:direct")

    @property
    def held(self) -> str:
        """Sorted set: results that are kept for whoever asks for them, by the server time, ms, since when."""
        return self._key("held")

    @property
    def collected(self) -> str:
        """Sorted set: those that were handed over, until their rows are said to be read."""
        return self._key("collected")

    @property
    def ready(self) -> str:
        """Sorted set: accepted groups that wait for a batch, by the order of their commit."""
        return self._key("ready")

    @property
    def cut(self) -> str:
        """Hash: task id -> batch id, for groups in batches that nobody has read yet."""
        return self._key("cut")

    @property
    def leases(self) -> str:
        """Sorted set: ``task:idx:attempt`` by the server time, ms, at which its lease ends."""
        return self._key("leases")

    @property
    def deadlines(self) -> str:
        """Sorted set: running task ids by the server time, ms, of their deadline."""
        return self._key("deadlines")

    @property
    def first_keys(self) -> str:
        """Hash: workflow -> the key set of its first tensor result in the run (msgpack)."""
        return self._key("first_keys")

    @property
    def evicted(self) -> str:
        """List: evicted groups whose dump the collector has yet to mark."""
        return self._key("evicted")

    @property
    def rewrites(self) -> str:
        """List: dumped groups whose rewards were normalized since, with those rewards (:class:`DumpRewrite`)."""
        return self._key("rewrites")

    @property
    def drops(self) -> str:
        """Stream, trimmed: groups that did not reach a trainer, and why."""
        return self._key("drops")

    @property
    def dead(self) -> str:
        """Sorted set: groups with dead letters by the server time, ms, of their first. ``dead:sizes``: their bytes."""
        return self._key("dead")

    def dead_group(self, task_id: int) -> str:
        """Hash: the dead letters of one group, and what it needs to run again."""
        return self._key(f"dead:{task_id}")

    @property
    def poison(self) -> str:
        """Sorted set: what was set aside as unreadable, by the server time, ms."""
        return self._key("poison")

    @property
    def poison_about(self) -> str:
        """Hash: where, why and the first bytes of each of those (msgpack)."""
        return self._key("poison:about")

    @property
    def jobs(self) -> str:
        """Sorted set: arq's queue of slot jobs."""
        return self._key("jobs")

    def results(self, partition: int) -> str:
        """Stream: headers of the ended slots of one partition's groups, which one collector owns by lease."""
        return self._key(f"results:{partition}")

    @property
    def partitions(self) -> str:
        """Hash: ``epoch:P``, the fencing epoch of partition P, and ``owner:P``, who held its lease last."""
        return self._key("partitions")

    def partition_lease(self, partition: int) -> str:
        """String with expiry: the owner of a partition of the results."""
        return self._key(f"lease:results:{partition}")

    @property
    def collectors(self) -> str:
        """Sorted set: collectors by the server time, ms, of their last heart-beat."""
        return self._key("collectors")

    @property
    def tally(self) -> str:
        """Hash: ``slots:usable slots:reason`` -> groups that were decided so since the last cut."""
        return self._key("tally")

    @property
    def batches(self) -> str:
        """Stream: indexes of cut batches."""
        return self._key("batches")

    @property
    def batches_kept(self) -> str:
        """Sorted set: ids of batches that were handed over and are still there, acknowledged ones among them."""
        return self._key("batches:kept")

    @property
    def batches_gone(self) -> str:
        """Sorted set: the last ids of those that went."""
        return self._key("batches:gone")

    @property
    def followers(self) -> str:
        """Sorted set: consumers that follow, by the server time, ms, when they last read or acknowledged."""
        return self._key("followers")

    @property
    def followers_missed(self) -> str:
        """Hash: consumer -> how many batches went before it had read them."""
        return self._key("followers:missed")

    @property
    def servers(self) -> str:
        """Set: base URLs of inference servers."""
        return self._key("servers")

    @property
    def workers(self) -> str:
        """Hash: worker id -> what it last said of itself (msgpack)."""
        return self._key("workers")

    @property
    def workers_seen(self) -> str:
        """Sorted set: worker ids by the server time, ms, of their last heart-beat."""
        return self._key("workers:seen")

    @property
    def workers_doing(self) -> str:
        """Hash: worker id -> what its attempts and its servers did at its last heart-beat (:class:`Doing`)."""
        return self._key("workers:doing")

    @property
    def collector(self) -> str:
        """String with expiry: the collector that leads."""
        return self._key("lease:collector")

    @property
    def wake_admission(self) -> str:
        """List of at most one entry: something changed that may let a group start."""
        return self._key("wake:admission")

    @property
    def wake_cutter(self) -> str:
        """List of at most one entry: something changed that may let a batch be cut."""
        return self._key("wake:cutter")

    @property
    def wake_jobs(self) -> str:
        """List of at most one entry: slot jobs were queued."""
        return self._key("wake:jobs")

    def group(self, task_id: int) -> str:
        """Hash: one group; after its end a tombstone that expires."""
        return self._key(f"group:{task_id}")

    def rows(self, task_id: int, sample_idx: int, attempt: int) -> str:
        """String: the encoded rows of one attempt."""
        return self._key(f"rows:{task_id}:{sample_idx}:{attempt}")

    def job_id(self, task_id: int, sample_idx: int, attempt: int) -> str:
        """The arq job id of an attempt."""
        return f"{{{self.run}}}:{task_id}:{sample_idx}:{attempt}"

    @staticmethod
    def parse_job_id(job_id: str) -> tuple[int, int, int]:
        """``(task_id, sample_idx, attempt)`` of an arq job id; ValueError if it is none of ours."""
        _, task_id, sample_idx, attempt = job_id.rsplit(":", 3)
        return int(task_id), int(sample_idx), int(attempt)
