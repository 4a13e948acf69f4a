import torch

from dualmcmc.data.order import Order


def test_each_epoch_sees_every_item_once_in_a_new_order():
    order = Order(10, seed=1)
    first, second = order.indices(0, 10), order.indices(10, 10)
    assert sorted(first.tolist()) == sorted(second.tolist()) == list(range(10))
    assert first.tolist() != second.tolist()


def test_a_walk_is_the_same_from_anywhere_in_any_pieces():
    whole = Order(7, seed=2).indices(0, 40)
    pieces = torch.cat([Order(7, seed=2).indices(start, 5) for start in range(0, 40, 5)])
    assert torch.equal(whole, pieces)
    assert not torch.equal(whole, Order(7, seed=3).indices(0, 40))


def test_a_batch_may_be_larger_than_the_set():
    assert len(Order(3, seed=0).indices(1, 11)) == 11
