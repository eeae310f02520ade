"""Reinforcement learning with one agent and several observers; the agent is asked for actions one batch at a time.

Written for torch.distributed.rpc.
"""

import sys
import threading

import torch
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp
from torch import nn, optim
from torch.distributed.rpc import RRef, remote, rpc_async, rpc_sync
from torch.futures import Future, wait_all

OBSERVERS, STEPS, EPISODES = 2, 5, 12


class Walk:
    """A walk on a line. Going right is rewarded."""

    def reset(self):
        self.place = 0.0
        return torch.tensor([self.place, 1.0])

    def step(self, action):
        self.place += 1.0 if action == 1 else -1.0
        return torch.tensor([self.place / STEPS, 1.0]), float(action == 1)


class Observer:
    def __init__(self):
        self.id = rpc.get_worker_info().id - 1
        self.world = Walk()

    def run_episode(self, agent_rref):
        state = self.world.reset()
        rewards = []
        for _ in range(STEPS):
            action = rpc_sync(agent_rref.owner(), Agent.select_action, args=(agent_rref, self.id, state))
            state, reward = self.world.step(action)
            rewards.append(reward)
        return self.id, rewards


class Agent:
    def __init__(self):
        torch.manual_seed(7)
        self.agent_rref = RRef(self)
        self.policy = nn.Linear(2, 2)
        self.optimizer = optim.SGD(self.policy.parameters(), lr=0.5)
        self.observer_rrefs = [remote(f"observer{n}", Observer) for n in range(1, OBSERVERS + 1)]
        self.states = torch.zeros(OBSERVERS, 2)
        self.future_actions = Future()
        self.pending = OBSERVERS
        self.lock = threading.Lock()
        self.log_probabilities = []

    @staticmethod
    @rpc.functions.async_execution
    def select_action(agent_rref, observer, state):
        self = agent_rref.local_value()
        self.states[observer].copy_(state)
        future_action = self.future_actions.then(lambda actions: actions.wait()[observer].item())
        with self.lock:
            self.pending -= 1
            if self.pending == 0:
                self.pending = OBSERVERS
                chances = torch.distributions.Categorical(logits=self.policy(self.states.clone()))
                actions = chances.sample()
                self.log_probabilities.append(chances.log_prob(actions))
                ready, self.future_actions = self.future_actions, Future()
                ready.set_result(actions)
        return future_action

    def run_episode(self):
        self.log_probabilities = []
        futures = [
            rpc_async(rref.owner(), run_observer, args=(rref, self.agent_rref)) for rref in self.observer_rrefs
        ]
        rewards = torch.zeros(STEPS, OBSERVERS)
        for observer, earned in wait_all(futures):
            rewards[:, observer] = torch.tensor(earned)
        loss = -(torch.stack(self.log_probabilities) * (rewards - 0.5)).mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return rewards.mean().item()


def run_observer(observer_rref, agent_rref):
    return observer_rref.local_value().run_episode(agent_rref)


def run(rank, port):
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"tcp://127.0.0.1:{port}", rpc_timeout=60)
    name = f"observer{rank}" if rank else "agent"
    rpc.init_rpc(name, rank=rank, world_size=OBSERVERS + 1, rpc_backend_options=options)
    if rank == 0:
        agent = Agent()
        rewards = [agent.run_episode() for _ in range(EPISODES)]
        assert sum(rewards[-4:]) > sum(rewards[:4]), rewards
        print("the agent learned", flush=True)
        del agent
    rpc.shutdown()


if __name__ == "__main__":
    mp.start_processes(run, args=(int(sys.argv[1]),), nprocs=OBSERVERS + 1, start_method="fork")
