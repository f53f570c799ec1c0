import pytest

from megatron_retool.cluster.learner_group import _of_rank
from megatron_retool.cluster.placement import plan_placement
from megatron_retool.config import ConfigError, load_config

GAE = ["algorithm.advantage=gae", "algorithm.dynamic_sampling.enable=false"]
PPO = [*GAE, "learner.world_size=2", "cluster.gpus_per_node=4", "rollout.engine.count=4"]


def gpus_by_role(placement):
    found = {}
    for slot in placement.slots:
        found.setdefault(slot.role, []).extend(slot.gpus)
    return found


def test_critic_has_gpus_of_its_own_between_learner_and_engines():
    placement = plan_placement(load_config(None, [*PPO, "cluster.nodes=2"]))
    assert gpus_by_role(placement) == {"learner": [0, 1], "critic": [2, 3], "engine": [4, 5, 6, 7]}
    assert placement.gpus("critic", 1) == (3,)


def test_colocated_roles_share_the_same_gpus():
    colocated = ["cluster.nodes=1", "cluster.placement=colocated", "weight_sync.method=tensor"]
    placement = plan_placement(load_config(None, [*PPO, *colocated]))
    assert gpus_by_role(placement) == {"learner": [0, 1], "critic": [0, 1], "engine": [0, 1, 2, 3]}
    assert placement.gpus("critic", 0) == placement.gpus("learner", 0) == placement.gpus("engine", 0) == (0,)


def test_too_few_gpus_for_a_critic_is_said():
    with pytest.raises(ConfigError, match="critic.*gae.*need 8"):
        plan_placement(load_config(None, [*PPO, "cluster.nodes=1"]))


def test_only_ppo_has_a_critic():
    placement = plan_placement(load_config(None, ["cluster.gpus_per_node=4", "learner.world_size=2"]))
    assert "critic" not in gpus_by_role(placement)
    on_cpu = plan_placement(load_config(None, [*GAE, "learner.world_size=2"]))
    assert [slot.role for slot in on_cpu.slots] == ["learner", "learner", "critic", "critic", "engine"]


def test_the_cores_of_a_node_are_shared_by_the_ranks_that_are_on_it():
    """Learner and critic work at the same time where each has GPUs of its own; a last node may have fewer ranks."""
    own = plan_placement(load_config(None, [*PPO, "cluster.nodes=2"]))
    assert [own.ranks_beside(role, rank) for role in ("learner", "critic") for rank in range(2)] == [4] * 4
    colocated = ["cluster.nodes=1", "cluster.placement=colocated", "weight_sync.method=tensor"]
    assert plan_placement(load_config(None, [*PPO, *colocated])).ranks_beside("critic", 0) == 2
    # 30 prompts x 16.
    three = [
        "data.train_batch_size=30",
        "cluster.gpus_per_node=2",
        "cluster.nodes=3",
        "learner.world_size=3",
        "learner.mini_batch_size=48",
    ]
    found = plan_placement(load_config(None, three))
    assert [found.ranks_beside("learner", rank) for rank in range(3)] == [2, 2, 1]
    assert _of_rank(found, "learner", 2) == {"LOCAL_WORLD_SIZE": "1"}
    assert _of_rank(plan_placement(load_config(None, ["learner.world_size=2"])), "learner", 1) == {}
