"""Programs that found bugs, by what was wrong; run on every occasion."""

from __future__ import annotations

from tests.autograd.language import Backward, Body, Call, Calls, Hook, Leaf, Op, Program

CORPUS: dict[str, Program] = {
    "fast: news of a worker was lost when the pass closed there early": Program(
        2,
        2,
        Body(
            0,
            (
                Leaf(0),
                Calls((Call(1, (0,), Body(1, (
                    Leaf(0),
                    Op("add", (1, 1)),
                    Calls((Call(1, (2,), Body(1, (Leaf(0), Op("cat", (0, 1))), (2,))),)),
                    Op("mul", (2, 2)),
                    Calls((Call(0, (4,), Body(1, (Leaf(0), Op("cat", (0, 1))), (2,))),)),
                    Op("cat", (0, 1, 2, 3, 4, 5)),
                ), (6,))),)),
                Op("cat", (0, 1)),
                Backward((2,)),
            ),
        ),
    ),
    "node hooks: what a node gives to a value that waits for others was not seen": Program(
        2,
        2,
        Body(
            0,
            (
                Leaf(0),
                Op("tanh", (0,)),
                Calls((Call(1, (1,), Body(1, (Op("tanh", (0,)),), (1,))),)),
                Op("mul", (0, 1)),
                Hook(3, "bend node"),
                Op("cat", (2, 3)),
                Backward((4,)),
            ),
        ),
    ),
    "node hooks: what a node gives to a row that waits for others was seen as a matrix": Program(
        2,
        2,
        Body(
            0,
            (
                Leaf(0),
                Leaf(1),
                Op("tanh", (1,)),
                Calls((Call(1, (2,), Body(1, (Op("tanh", (0,)),), (1,))),)),
                Op("mul", (2, 0)),
                Hook(4, "bend node"),
                Op("cat", (3, 4)),
                Backward((5,)),
            ),
        ),
    ),
    "no_grad: what a coroutine left on its owner had a history": Program(
        2,
        2,
        Body(
            0,
            (
                Leaf(0),
                Calls((Call(0, (0,), Body(1, (Leaf(0), Op("cat", (1,))), (2,)), "remote", "coroutine", no_grad=True),)),
                Backward((1,)),
            ),
        ),
    ),
    "no_grad: a parameter that was returned came as a new leaf": Program(
        2, 2, Body(0, (Leaf(0), Calls((Call(0, (0,), Body(1, (Leaf(0),), (1,)), no_grad=True),)), Backward((1,))))
    ),
}  # fmt: skip
