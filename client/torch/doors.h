// What reaches managed tensors without an operator: `tensor.data = other`, and a forked child.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>

namespace misa::torch_client {

// Who is told around `tensor.set_data(other)` (in Python `tensor.data = other`). `before` may throw; nothing has
// changed then. Null ends it.
struct DataDoor {
  std::function<void(const at::TensorBase& tensor)> before;
  std::function<void(const at::TensorBase& tensor)> after;
};
void SetDataDoor(const DataDoor* door);

// Called around fork() in the forking thread, from the first call on; `child` in the child, where no other thread is.
struct ForkDoor {
  std::function<void()> prepare;
  std::function<void()> parent;
  std::function<void()> child;
};
void SetForkDoor(const ForkDoor* door);

// This process was forked from one that had a fork door open: the memory that was managed there is not its own.
bool InForkedChild();

}  // namespace misa::torch_client
