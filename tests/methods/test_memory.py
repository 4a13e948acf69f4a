import torch

from dualmcmc.methods.memory import Memory


def test_write():
    """Of several values for a row the last one counts, whatever the order of the writes."""
    memory = Memory({"a": torch.zeros(5, 2)}, torch.arange(3))
    memory.write("a", torch.tensor([3, 1, 3]), torch.tensor([[1.0, 1], [2, 2], [3, 3]]))
    assert memory["a"].tolist() == [[0, 0], [2, 2], [0, 0], [3, 3], [0, 0]]


def test_nothing_is_written_while_statistics_are_measured():
    memory = Memory({"a": torch.zeros(5)}, torch.arange(1), read_only=True)
    memory.write("a", torch.tensor([0]), torch.ones(1))
    assert not memory["a"].any()


def test_all_processes_write_the_parts_of_all():
    memory = Memory({"a": torch.zeros(4)}, torch.arange(1), all_gather=lambda part: torch.cat([part, part + 1]))
    memory.write("a", torch.tensor([1]), torch.tensor([5.0]))
    assert memory["a"].tolist() == [0, 5, 6, 0]
