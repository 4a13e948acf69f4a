import pytest

from dualmcmc import settings
from dualmcmc.engine.folder import RunFolder
from dualmcmc.errors import UserError
from tests.conftest import tiny


def test_states_in_order_and_pruned(tmp_path):
    folder = RunFolder(tmp_path)
    folder.states.mkdir()
    assert not folder.holds_a_run()
    with pytest.raises(UserError, match="no saved state"):
        folder.latest_state()
    for images in (100, 5, 1000):
        folder.state_path(images).touch()
    (folder.states / "notes.safetensors").touch()
    assert folder.holds_a_run()
    assert [int(path.stem) for path in folder.saved_states()] == [5, 100, 1000]
    folder.prune_states(2)
    assert [int(path.stem) for path in folder.saved_states()] == [100, 1000]
    assert (folder.states / "notes.safetensors").exists()


def test_settings_are_written_to_be_read(tmp_path):
    folder = RunFolder(tmp_path)
    with pytest.raises(UserError, match="not a run folder"):
        folder.require_run()
    folder.write_config(tiny())
    folder.require_run()
    assert settings.load_config(str(folder.config)) == tiny()
