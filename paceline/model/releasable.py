"""Memory of tensors that is freed and allocated again, while all views of it stay valid."""

from collections.abc import Iterable

from torch import Tensor


class ReleasableMemory:
    def __init__(self, tensors: Iterable[Tensor]) -> None:
        found = {tensor.untyped_storage().data_ptr(): tensor for tensor in tensors}
        self._storages = [tensor.untyped_storage() for tensor in found.values()]
        self._sizes = [storage.nbytes() for storage in self._storages]

    def release(self) -> None:
        for storage in self._storages:
            storage.resize_(0)

    def restore(self) -> None:
        """Allocate the memory again if it was released. Its content is undefined."""
        for storage, size in zip(self._storages, self._sizes, strict=True):
            if storage.nbytes() != size:
                storage.resize_(size)
