// A CUDA device that lives in host memory; pretend_gpu.py says what it is for.
//
// Tensors of device "cuda" have memory of the host's allocator. An operator on them runs the CPU's kernel on tensors that
// share this memory (`fallback`); a CPU tensor among its arguments is an error, unless it is a scalar, as on a GPU. Copies to
// the host with non_blocking=True are put off until `pretend_flush`: until then the target is filled with NaN bytes.
// Work is done when it is issued, but its order is that of the streams: what a GPU could do in another order is an error.
#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/DispatchStub.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <set>
#include <unordered_map>

using at::Tensor;

namespace {

constexpr auto GPU = c10::DeviceType::CUDA;
const c10::Device DEVICE(GPU, 0);

struct Guard final : c10::impl::NoOpDeviceGuardImpl<GPU> {
  c10::Device getDevice() const override { return DEVICE; }
  c10::Device exchangeDevice(c10::Device) const override { return DEVICE; }
  c10::Stream getStream(c10::Device) const noexcept override { return c10::Stream(c10::Stream::DEFAULT, DEVICE); }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)

std::atomic<int64_t> bytes_now{0}, bytes_most{0};

// ---- the order of work in streams ----
//
// Events and waits of the host are numbered (moments). Work has the number of the last one before it, so an event comes after
// the work of its stream if its number is larger.

constexpr int HOST = -1;
thread_local int current = 0;  // the stream of this thread
std::recursive_mutex order_lock;
int64_t moments = 0;
std::map<int, std::map<int, int64_t>> known;  // by stream: the last moment of each other one that its work now comes after
std::string problem;                          // with a free, which cannot throw

struct Use {
  int64_t moment;
  const std::string* op;  // of a schema, which stays
};

struct Block {
  c10::DataPtr data;
  int64_t size;
  int stream;
  int64_t born;
  std::map<int, Use> reads, writes;  // the last of each stream
  std::set<int> recorded;            // `record_stream`
};

// Whether work of a stream that is issued now comes after that of another which was issued at a moment.
bool follows(int stream, int other, int64_t moment) {
  return stream == other || known[stream][other] > moment || known[HOST][other] > moment;
}

// The host waits for this thread's stream.
void host_waits() {
  std::lock_guard<std::recursive_mutex> lock(order_lock);
  for (auto [other, moment] : known[current]) known[HOST][other] = std::max(known[HOST][other], moment);
  known[HOST][current] = ++moments;
}

void use(Block& block, const std::string& op, bool write) {
  std::lock_guard<std::recursive_mutex> lock(order_lock);
  if (!problem.empty()) {
    std::string found;
    found.swap(problem);
    TORCH_CHECK(false, found);
  }
  TORCH_CHECK(
      follows(current, block.stream, block.born), "pretended GPU: ", op, " in stream ", current, " uses ", block.size,
      " bytes that were allocated in stream ", block.stream, ", without waiting for it: its earlier work may still use them");
  auto check = [&](const std::map<int, Use>& uses, const char* does) {
    for (auto& [other, last] : uses)
      TORCH_CHECK(
          follows(current, other, last.moment), "pretended GPU: ", op, " in stream ", current, write ? " writes " : " reads ",
          block.size, " bytes that ", *last.op, " in stream ", other, does, ", without waiting for it");
  };
  check(block.writes, " writes");
  if (write) check(block.reads, " reads");
  (write ? block.writes : block.reads)[current] = {moments, &op};
}

void check_free(Block& block) {
  std::lock_guard<std::recursive_mutex> lock(order_lock);
  for (auto* uses : {&block.reads, &block.writes})
    for (auto& [other, last] : *uses)
      if (problem.empty() && !block.recorded.count(other) && !follows(block.stream, other, last.moment))
        problem = c10::str(
            "pretended GPU: ", block.size, " bytes of stream ", block.stream, " were freed while ", *last.op, " in stream ", other,
            " may still use them (found after the free)");
}

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    auto* block = new Block{c10::GetCPUAllocator()->allocate(size), static_cast<int64_t>(size), current};
    {
      std::lock_guard<std::recursive_mutex> lock(order_lock);
      block->born = moments;
    }
    if (size > 0) std::memset(block->data.get(), 0xFF, size);  // nobody may count on zeros
    bytes_now += block->size;
    bytes_most = std::max(bytes_most.load(), bytes_now.load());
    return {block->data.get(), block, &release, DEVICE};
  }
  static void release(void* context) {
    auto* block = static_cast<Block*>(context);
    bytes_now -= block->size;
    check_free(*block);
    delete block;
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, std::size_t count) const override { std::memcpy(to, from, count); }
};
Memory memory;
struct Register {
  Register() { c10::SetAllocator(GPU, &memory); }
} register_memory;

Block* block_of(c10::StorageImpl* storage) {
  auto& data = storage->data_ptr();
  return data.get_deleter() == &Memory::release ? static_cast<Block*>(data.get_context()) : nullptr;
}

void use(const Tensor& t, const std::string& op, bool write) {
  if (!t.defined() || !t.is_cuda() || t.numel() == 0) return;
  if (auto* block = block_of(t.storage().unsafeGetStorageImpl())) use(*block, op, write);
}

std::mutex pinned_lock;
std::set<const void*> pinned;

struct Pinned final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    auto* held = new c10::DataPtr(c10::GetCPUAllocator()->allocate(size));
    std::lock_guard<std::mutex> lock(pinned_lock);
    pinned.insert(held->get());
    return {held->get(), held, &release, c10::Device(c10::kCPU)};
  }
  static void release(void* context) {
    auto* held = static_cast<c10::DataPtr*>(context);
    {
      std::lock_guard<std::mutex> lock(pinned_lock);
      pinned.erase(held->get());
    }
    delete held;
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, std::size_t count) const override { std::memcpy(to, from, count); }
};
Pinned pinned_memory;

// ---- copies to the host that the device has not done yet ----

struct Copy {
  int64_t number;
  Tensor to, from;
};
std::recursive_mutex copies_lock;
std::deque<Copy> copies;
int64_t issued = 0;

Tensor on_host(const Tensor& t);

void flush(int64_t until) {
  std::lock_guard<std::recursive_mutex> lock(copies_lock);
  while (!copies.empty() && copies.front().number <= until) {
    Copy copy = copies.front();
    copies.pop_front();
    copy.to.copy_(copy.from);
  }
}

// ---- tensors ----

Tensor make(c10::Storage storage, const Tensor& like) {
  auto t = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CUDA), like.dtype());
  t.unsafeGetTensorImpl()->set_storage_offset(like.storage_offset());
  t.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides());
  return t;
}

// The same memory as a CPU tensor, which keeps it alive.
Tensor on_host(const Tensor& t) {
  if (!t.defined() || !t.is_cuda()) return t;
  auto& from = t.storage();
  auto release = [](void* held) { delete static_cast<c10::Storage*>(held); };
  c10::DataPtr data(from.mutable_data(), new c10::Storage(from), release, c10::Device(c10::kCPU));
  c10::Storage storage(c10::Storage::use_byte_size_t(), from.nbytes(), std::move(data), c10::GetCPUAllocator(), true);
  auto alias = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), t.dtype());
  alias.unsafeGetTensorImpl()->set_storage_offset(t.storage_offset());
  alias.unsafeGetTensorImpl()->set_sizes_and_strides(t.sizes(), t.strides());
  if (t.is_conj()) alias._set_conj(true);
  return alias;
}

// A CPU tensor that a kernel has made, on the device.
Tensor on_device(const Tensor& t) {
  if (!t.defined() || t.is_cuda()) return t;
  auto size = t.storage().nbytes();
  auto data = memory.allocate(size);
  if (size > 0) std::memcpy(data.get(), t.storage().data(), size);
  return make(c10::Storage(c10::Storage::use_byte_size_t(), size, std::move(data), &memory, true), t);
}

struct Call {
  const c10::OperatorHandle& op;
  std::unordered_map<c10::TensorImpl*, Tensor> originals;  // by alias
  std::vector<Tensor> aliases;                             // keeps them alive

  // Collectives write to their first argument; messages are read.
  bool writes(const c10::Argument& argument) const {
    const auto& name = op.schema().name();
    if (name.rfind("c10d::", 0) == 0) return name != "c10d::send" && &argument == &op.schema().arguments()[0];
    const auto* alias = argument.alias_info();
    if (alias == nullptr || argument.name() == "grads") return false;  // of fused optimizers, which write them to unscale them only
    for (const auto& inner : alias->containedTypes())
      if (inner.isWrite()) return true;
    return alias->isWrite();
  }

  Tensor enter(const Tensor& t, const c10::Argument& argument) {
    const auto& name = argument.name();
    if (!t.defined()) return t;
    if (!t.is_cuda()) {
      TORCH_CHECK(
          t.dim() == 0, "pretended GPU: ", op.schema().operator_name(), " gets a CPU tensor ", t.sizes(), " as '", name,
          "' beside tensors of the device");
      return t;
    }
    use(t, op.schema().name(), writes(argument));
    auto alias = on_host(t);
    aliases.push_back(alias);
    originals.emplace(alias.unsafeGetTensorImpl(), t);
    return alias;
  }

  Tensor leave(const Tensor& t) {
    if (!t.defined()) return t;
    auto found = originals.find(t.unsafeGetTensorImpl());
    if (found != originals.end()) return found->second;
    for (auto& [alias, original] : originals) {
      if (alias->storage().data() == t.storage().data() && t.storage().nbytes() > 0 && t.storage().unsafeGetStorageImpl() == alias->storage().unsafeGetStorageImpl())
        return make(original.storage(), t);
    }
    return on_device(t);
  }

  // An output that a kernel has resized.
  void settle() {
    for (auto& alias : aliases) {
      auto& original = originals.at(alias.unsafeGetTensorImpl());
      bool moved = alias.storage().data() != original.storage().data();
      if (!moved && alias.sizes() == original.sizes() && alias.strides() == original.strides()) continue;
      auto fresh = moved ? on_device(alias) : make(original.storage(), alias);
      original.unsafeGetTensorImpl()->set_storage_keep_dtype(fresh.storage());
      original.unsafeGetTensorImpl()->set_sizes_and_strides(fresh.sizes(), fresh.strides());
      original.unsafeGetTensorImpl()->set_storage_offset(fresh.storage_offset());
    }
  }

  c10::IValue entered(const c10::IValue& v, const c10::Argument& argument) {
    if (v.isTensor()) return enter(v.toTensor(), argument);
    if (v.isTensorList()) {
      std::vector<Tensor> found;
      for (const Tensor& t : v.toTensorVector()) found.push_back(enter(t, argument));
      return found;
    }
    if (v.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> found;
      for (const std::optional<Tensor>& t : v.toOptionalTensorVector())
        found.push_back(t.has_value() ? std::optional<Tensor>(enter(*t, argument)) : std::nullopt);
      return found;
    }
    if (v.isDevice()) return c10::IValue(c10::Device(c10::kCPU));
    return v;
  }
};

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  at::AutoDispatchBelowADInplaceOrView guard;
  const auto& arguments = op.schema().arguments();
  auto first = stack->size() - arguments.size();
  Call call{op, {}, {}};
  for (size_t i = 0; i < arguments.size(); ++i) (*stack)[first + i] = call.entered((*stack)[first + i], arguments[i]);
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  call.settle();
  if (op.hasTag(at::Tag::dynamic_output_shape) || op.hasTag(at::Tag::data_dependent_output)) host_waits();
  auto outputs = op.schema().returns().size();
  for (auto i = stack->size() - outputs; i < stack->size(); ++i) {
    auto& v = (*stack)[i];
    if (v.isTensor()) {
      v = call.leave(v.toTensor());
    } else if (v.isTensorList()) {
      std::vector<Tensor> found;
      for (const Tensor& t : v.toTensorVector()) found.push_back(call.leave(t));
      v = found;
    }
  }
}

Tensor empty_strided(
    c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device>, std::optional<bool> pin) {
  TORCH_CHECK(!pin.value_or(false), "only CPU memory can be pinned");
  return at::detail::empty_strided_generic(
      size, stride, &memory, c10::DispatchKeySet(c10::DispatchKey::CUDA), c10::dtype_or_default(dtype));
}

Tensor empty(
    c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<at::Device>,
    std::optional<bool> pin, std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!pin.value_or(false), "only CPU memory can be pinned");
  return at::detail::empty_generic(
      size, &memory, c10::DispatchKeySet(c10::DispatchKey::CUDA), c10::dtype_or_default(dtype), format);
}

Tensor& copy_(Tensor& self, const Tensor& source, bool non_blocking) {
  at::AutoDispatchBelowADInplaceOrView guard;
  static const std::string name = "aten::copy_";
  use(source, name, false);
  use(self, name, true);
  if (!non_blocking && self.is_cuda() != source.is_cuda()) host_waits();
  std::lock_guard<std::recursive_mutex> lock(copies_lock);
  if (!source.is_cuda()) flush(issued);  // what is read may be on its way to the host
  auto from = on_host(source);
  if (self.is_cuda() || !non_blocking) {
    if (!self.is_cuda()) flush(issued);  // the host waits for everything
    auto to = on_host(self);
    to.copy_(from);
    return self;
  }
  auto there = at::empty_strided(self.sizes(), self.strides(), self.options());
  there.copy_(from);
  if (self.is_contiguous() && self.nbytes() > 0) std::memset(self.data_ptr(), 0xFF, self.nbytes());
  copies.push_back({++issued, self, there});
  return self;
}

at::Scalar local_scalar(const Tensor& self) {
  static const std::string name = "aten::item";
  use(self, name, false);
  host_waits();
  flush(issued);
  return on_host(self).item();
}

const Tensor& resize_(const Tensor& self, c10::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  auto there = on_host(self);
  there.resize_(size, format);
  if (there.storage().data() != self.storage().data()) {
    auto fresh = on_device(there);
    self.unsafeGetTensorImpl()->set_storage_keep_dtype(fresh.storage());
  }
  self.unsafeGetTensorImpl()->set_sizes_and_strides(there.sizes(), there.strides());
  return self;
}

Tensor& set_storage(Tensor& self, at::Storage source, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(source));
  self.unsafeGetTensorImpl()->set_storage_offset(offset);
  if (stride.empty() && !size.empty()) {
    self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  } else {
    self.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride);
  }
  return self;
}

Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

Tensor as_strided(const Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, size, stride, offset);
}

Tensor view(const Tensor& self, c10::IntArrayRef size) { return at::native::view(self, size); }

Tensor reshape_alias(const Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride) {
  return at::native::as_strided_tensorimpl(self, size, stride, self.storage_offset());
}

int64_t attention(
    const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, double, bool, std::optional<double>, bool) {
  return 0;  // composed of matmuls
}

}  // namespace

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("copy_", &copy_);
  m.impl("_local_scalar_dense", &local_scalar);
  m.impl("resize_", &resize_);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("set_.source_Tensor", &set_tensor);
  m.impl("as_strided", &as_strided);
  m.impl("view", &view);
  m.impl("_reshape_alias", &reshape_alias);
}

// Collectives and messages are gloo's, for which the tensors are the host's.
TORCH_LIBRARY_IMPL(c10d, CUDA, m) {
  for (auto name : {"allreduce_", "allgather_", "_allgather_base_", "_reduce_scatter_base_", "broadcast_", "reduce_", "send",
                    "recv_", "alltoall_base_"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

namespace at {
struct CUDAHooks : CUDAHooksInterface {
  explicit CUDAHooks(CUDAHooksArgs) {}
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  DeviceIndex current_device() const override { return 0; }
  int getNumGPUs() const override { return 0; }  // no generators to be seeded
  Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  bool isPinnedPtr(const void* data) const override {
    std::lock_guard<std::mutex> lock(pinned_lock);
    return pinned.count(data) > 0;
  }
};
REGISTER_CUDA_HOOKS(CUDAHooks)

namespace native {
static struct Choice {
  Choice() { _fused_sdp_choice_stub.set_cuda_dispatch_ptr(&attention); }
} choice;
}  // namespace native
}  // namespace at

extern "C" {
// The number of the last copy to the host that was put off.
int64_t pretend_issued() {
  std::lock_guard<std::recursive_mutex> lock(copies_lock);
  return issued;
}
// Do the copies up to a number.
void pretend_flush(int64_t until) {
  at::AutoDispatchBelowADInplaceOrView guard;
  flush(until);
}
// The number of a new event or wait of the host.
int64_t pretend_moment() {
  std::lock_guard<std::recursive_mutex> lock(order_lock);
  return ++moments;
}
// This thread's stream.
void pretend_stream(int stream) { current = stream; }
// From now on the work of a stream (-1: what the host issues) comes after a moment of another.
void pretend_order(int stream, int other, int64_t moment) {
  std::lock_guard<std::recursive_mutex> lock(order_lock);
  known[stream][other] = std::max(known[stream][other], moment);
}
// record_stream
void pretend_record(c10::StorageImpl* storage, int stream) {
  std::lock_guard<std::recursive_mutex> lock(order_lock);
  if (auto* block = block_of(storage)) block->recorded.insert(stream);
}
// What a free was too early for, if no operator has reported it; empty: nothing.
const char* pretend_problem() { return problem.c_str(); }
int64_t pretend_bytes(int most) { return most ? bytes_most : bytes_now; }
void pretend_reset_peak() { bytes_most = bytes_now.load(); }
// Resize a storage of the device (torch's own needs a CUDA build).
void pretend_resize(c10::StorageImpl* storage, int64_t size) {
  auto data = memory.allocate(size);
  auto kept = std::min<int64_t>(size, storage->nbytes());
  if (kept > 0) std::memcpy(data.get(), storage->data(), kept);
  storage->set_data_ptr_noswap(std::move(data));
  storage->set_nbytes(size);
}
}
