"""Conformance of an array type that lives on a device, and of its adapter."""

# ruff: noqa: D102 - the name of a test is the sentence that it proves

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import pytest

from gpuspill.device.adapters import all_adapters
from gpuspill.device.arrays import ArrayRegistry
from gpuspill.device.port import Device, Layout
from gpuspill.testing.device_suite import fetch, store

__all__ = ["ArrayTests"]


class ArrayTests:
    """Conformance: an array type whose memory is on a device, and its adapter."""

    @pytest.fixture
    def device(self) -> Any:
        """Yield the device that new arrays are on; close it afterwards."""
        raise NotImplementedError

    @pytest.fixture
    def registry(self) -> ArrayRegistry:
        """Return a registry that knows the array type."""
        return ArrayRegistry(all_adapters())

    def asarray(self, host: Any) -> Any:
        """Return a NumPy array as an array on the device."""
        raise NotImplementedError

    def asnumpy(self, array: Any) -> Any:
        """Return an array on the device as a NumPy array."""
        raise NotImplementedError

    def views(self, array: Any) -> list[Any]:
        """Return views of an array of shape (6, 8), as many kinds as the library has."""
        return [array, array[1:], array[:, 2:5], array[2, 3:], array[::2], array.T, array[1:3].T]

    def write(self, array: Any, index: tuple[int, int], value: float) -> None:
        """Write an element of an array on the device."""
        array[index] = value

    def forget(self) -> None:
        """Have the library free what it means to free later."""

    def test_views_share_an_identity_and_have_their_own_layouts(self, registry: ArrayRegistry, device: Device) -> None:
        views = self.views(self.asarray(np.arange(48.0).reshape(6, 8)))
        found = [registry.describe(view) for view in views]
        assert all(description is not None and not description.estimated for description in found)
        assert len({description.identity for description in found if description}) == 1
        for view, description in zip(views, found, strict=True):
            assert description is not None
            low, high = description.layout.span
            assert 0 <= low <= high <= description.identity.nbytes
            assert description.layout.shape == tuple(view.shape)
            assert registry.is_on_device(view)

    def test_arrays_of_their_own_have_identities_of_their_own(self, registry: ArrayRegistry, device: Device) -> None:
        arrays = [self.asarray(np.arange(48.0)) for _ in range(3)]
        assert len({d.identity for d in map(registry.describe, arrays) if d is not None}) == 3

    def test_a_description_keeps_the_memory(self, registry: ArrayRegistry, device: Device) -> None:
        array = self.asarray(np.arange(48.0))
        description = registry.describe(array)
        assert description is not None
        del array
        device.synchronize()
        borrowed = device.borrow(description.identity, description.owner)
        low, high = description.layout.span
        assert fetch(device, borrowed)[low:high] == np.arange(48.0).tobytes()

    def test_a_description_of_any_view_keeps_the_memory(self, registry: ArrayRegistry, device: Device) -> None:
        """Until nothing else does, and whatever else the library allocates."""
        host = np.arange(48.0).reshape(6, 8)
        kinds = len(self.views(self.asarray(host)))
        for kind in range(kinds):
            description = registry.describe(self.views(self.asarray(host))[kind])
            assert description is not None
            self.forget()
            others = [self.asarray(np.zeros((6, 8))) for _ in range(4)]
            device.synchronize()
            borrowed = device.borrow(description.identity, description.owner)
            low, high = description.layout.span
            assert fetch(device, borrowed)[low:high] == host.tobytes()[low:high]
            del others, borrowed, description

    def test_the_token_of_memory_lives_as_long_as_it(self, registry: ArrayRegistry, device: Device) -> None:
        array = self.asarray(np.arange(48.0).reshape(6, 8))
        views = self.views(array)
        tokens = [getattr(registry.describe(view), "token", None) for view in views]
        token = tokens[0]
        assert all(other is token for other in tokens)
        try:
            alive = weakref.ref(token)
        except TypeError:
            return  # then it is not looked at either
        del token, tokens, array
        self.forget()
        assert alive() is not None
        del views
        self.forget()
        assert alive() is None

    def test_views_are_spilled_and_restored_together(self, registry: ArrayRegistry, device: Device) -> None:
        """Down and up: one copy each way, and the restored views share memory again."""
        views = self.views(self.asarray(np.arange(48.0).reshape(6, 8)))
        expected = [self.asnumpy(view) for view in views]
        found = [description for view in views if (description := registry.describe(view)) is not None]
        recipes = [description.recipe for description in found]
        identity = found[0].identity
        host = bytearray(identity.nbytes)
        before = device.statistics()
        device.synchronize()
        source = device.borrow(identity, found[0].owner)
        device.copy_to_host(source, host, device.stream("to_host")).wait()
        del source, found, views
        restored = device.allocate(identity.nbytes)
        device.copy_to_device(host, restored, device.stream("to_device")).wait()
        arrays = [registry.rebuild(recipe, restored) for recipe in recipes if recipe is not None]
        after = device.statistics()
        assert after.copies_to_host - before.copies_to_host == 1
        assert after.copies_to_device - before.copies_to_device == 1
        assert len(arrays) == len(expected)
        for array, values in zip(arrays, expected, strict=True):
            np.testing.assert_array_equal(self.asnumpy(array), values)
        identities = {d.identity for d in map(registry.describe, arrays) if d is not None}
        assert identities == {restored.identity}
        self.write(arrays[0], (2, 3), -1.0)
        assert self.asnumpy(arrays[3])[0] == -1.0  # [2, 3:] of the same memory

    def test_a_rebuilt_array_keeps_the_memory(self, registry: ArrayRegistry, device: Device) -> None:
        before = device.statistics().live_bytes
        allocation = store(device, np.arange(6.0).tobytes())
        recipe_of = registry.describe(self.asarray(np.zeros(6)))
        assert recipe_of is not None
        assert recipe_of.recipe is not None
        recipe = recipe_of.recipe
        del recipe_of
        array = registry.rebuild(recipe, allocation)
        del allocation
        assert device.statistics().live_bytes == before + 48
        np.testing.assert_array_equal(self.asnumpy(array), np.arange(6.0))
        del array
        assert device.statistics().live_bytes == before

    def test_an_array_beyond_its_memory_is_refused(self, registry: ArrayRegistry, device: Device) -> None:
        description = registry.describe(self.asarray(np.arange(48.0)))
        assert description is not None
        assert description.recipe is not None
        too_large = Layout(8, (48,), (8,), description.layout.dtype, 8)
        recipe = type(description.recipe)(description.recipe.adapter, too_large)
        with pytest.raises(ValueError, match="within"):
            registry.rebuild(recipe, device.allocate(48 * 8))
