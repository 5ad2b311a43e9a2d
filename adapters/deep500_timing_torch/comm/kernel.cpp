// Sees every communication operation that PyTorch's dispatcher hands to a process group.
//
// DDP's reducer, FSDP, DTensor, functional and compiled collectives call `c10d::...` operators from C++, which patched
// Python functions do not see. A boxed kernel at the dispatch key BackendSelect runs before every backend's own kernel
// and after autograd, tracing and fake tensors: each operation that really runs passes it once, in inference mode too.
// It tells Python of the call and its end (`comm/_operation.py`), and returns the operation's handle in a wrapper, so
// that waits from Python, from C++ and from `wait_tensor` of the functional collectives are all seen.

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <tuple>
#include <typeindex>
#include <unordered_map>
#include <utility>
#include <vector>

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

namespace py = pybind11;

namespace {

using Group = c10d::ProcessGroup;
using Work = c10d::Work;

// The rules of `comm/_ops.py` for each operator: its name, the argument whose bytes are the size of the message, the
// argument that is one rank's share of it where the former is empty, and Python's `Op`.
using Rule = std::tuple<std::string, std::string, std::string, py::object>;

std::atomic<bool> enabled{false};
// Python's dispatched(op, nbytes, group, tensor): a PendingOp or None; and the methods of a PendingOp, looked up once.
struct Python {
  py::object dispatched, called, ended, end_wait, failed, launched, not_followed, start_wait, untimed;
};
// Never destroyed: threads of the backends and of autograd outlive the interpreter.
Python* python = new Python;

// A Python object that may be let go on any thread, also when the interpreter is gone.
using Held = std::shared_ptr<PyObject>;

Held hold(py::object object) {
  return Held(object.release().ptr(), [](PyObject* held) {
    if (Py_IsInitialized()) {
      py::gil_scoped_acquire lock;
      Py_DECREF(held);
    }
  });
}

// Calls a method of a PendingOp. None of them raises; should one, the operation goes on.
template <class... Arguments>
py::object tell(const Held& op, const py::object& method, Arguments&&... arguments) {
  try {
    return method(py::handle(op.get()), std::forward<Arguments>(arguments)...);
  } catch (py::error_already_set& error) {
    error.discard_as_unraisable("deep500_timing_torch.comm");
    return py::none();
  }
}

// A C++ exception as Python will see it.
py::object error_of(const std::exception& failure) {
  return py::handle(PyExc_RuntimeError)(failure.what());
}

// --- the handle -------------------------------------------------------------------------------------------------------

// Not every PyTorch has blockCurrentStream.
template <class T>
auto block_stream(T& work, int) -> decltype(work.blockCurrentStream()) {
  return work.blockCurrentStream();
}
template <class T>
void block_stream(T&, long) {}

// Times the first wait, and passes everything on to the original, which it keeps as long as its caller keeps it.
class TimedWork final : public Work {
 public:
  TimedWork(c10::intrusive_ptr<Work> work, Held op)
      : Work(-1, work->retrieveOpType()), work_(std::move(work)), op_(std::move(op)) {}

  bool isCompleted() override { return work_->isCompleted(); }
  bool isSuccess() const override { return work_->isSuccess(); }
  std::exception_ptr exception() const override { return work_->exception(); }
  int sourceRank() const override { return work_->sourceRank(); }
  std::vector<at::Tensor> result() override { return work_->result(); }
  void synchronize() override { work_->synchronize(); }
  void blockCurrentStream() { block_stream(*work_, 0); }
  void abort() override { work_->abort(); }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return work_->getFuture(); }
  c10::intrusive_ptr<c10::ivalue::Future> getFutureResult() override { return work_->getFutureResult(); }
  float getDuration() const override { return work_->getDuration(); }
  uint64_t getSequencenumber() const override { return work_->getSequencenumber(); }

  bool wait(std::chrono::milliseconds timeout) override {
    if (waited_.exchange(true)) {
      return work_->wait(timeout);
    }
    Held token;
    {
      py::gil_scoped_acquire lock;
      token = hold(tell(op_, python->start_wait));
    }
    bool result = false;
    try {
      result = work_->wait(timeout);
    } catch (const std::exception& error) {
      py::gil_scoped_acquire lock;
      tell(op_, python->end_wait, py::handle(token.get()), error_of(error));
      throw;
    }
    py::gil_scoped_acquire lock;
    py::error_scope kept;
    tell(op_, python->end_wait, py::handle(token.get()));
    return result;
  }

 private:
  c10::intrusive_ptr<Work> work_;
  Held op_;
  std::atomic<bool> waited_{false};
};

// --- sizes ------------------------------------------------------------------------------------------------------------

// The object of a class that the operator's schema names; checking the class would cost more than everything else.
template <class T>
c10::intrusive_ptr<T> custom(const c10::IValue& value) {
  return c10::static_intrusive_pointer_cast<T>(value.toObjectRef().getSlot(0).toCapsule());
}

int64_t bytes_of(const at::Tensor& tensor) {
  if (!tensor.defined()) {
    return 0;
  }
  if (tensor.layout() == at::kSparse) {  // Its indices and its values travel.
    return int64_t(tensor._indices().nbytes() + tensor._values().nbytes());
  }
  return int64_t(tensor.nbytes());
}

int64_t bytes_of(const c10::IValue& value) {
  if (value.isTensor()) {
    return bytes_of(value.toTensor());
  }
  int64_t sum = 0;
  if (value.isList()) {
    for (const c10::IValue& inner : value.toListRef()) {
      sum += bytes_of(inner);
    }
  }
  return sum;
}

// Null if there is none.
const at::Tensor* first_tensor(const c10::IValue& value) {
  if (value.isTensor()) {
    return value.toTensor().defined() ? &value.toTensor() : nullptr;
  }
  if (value.isList()) {
    for (const c10::IValue& inner : value.toListRef()) {
      if (const at::Tensor* found = first_tensor(inner)) {
        return found;
      }
    }
  }
  return nullptr;
}

// --- the kernel -------------------------------------------------------------------------------------------------------

class Timed final : public c10::OperatorKernel {
 public:
  Timed(const Rule& rule, const c10::FunctionSchema& schema)
      : arguments_(schema.arguments().size()), op_(hold(std::get<3>(rule))) {
    const auto index_of = [&schema](const std::string& name) {
      return schema.argumentIndexWithName(name).value_or(-1);
    };
    group_ = index_of("process_group");
    async_ = index_of("async_op");
    size_ = index_of(std::get<1>(rule));
    share_ = index_of(std::get<2>(rule));
    returns_ = !schema.returns().empty();
    coalesced_ = std::get<0>(rule).find("coalesced") != std::string::npos;
  }

  void operator()(const c10::OperatorHandle& operation, c10::DispatchKeySet keys, c10::Stack* stack) {
    const auto below = keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, c10::DispatchKey::BackendSelect);
    Held op;
    bool blocking = false;
    if (enabled.load(std::memory_order_relaxed) && group_ >= 0 && !keys.has(c10::DispatchKey::Meta)) {
      try {
        blocking = async_ >= 0 && !argument(stack, async_).toBool();
        op = start(stack);
      } catch (const std::exception&) {
        op = nullptr;  // Arguments of an unknown form: the operation runs, and is counted as unseen.
      }
    }
    if (!op) {
      operation.redispatchBoxed(below, stack);
      return;
    }
    try {
      operation.redispatchBoxed(below, stack);
    } catch (const std::exception& error) {
      py::gil_scoped_acquire lock;
      py::error_scope kept;
      tell(op, python->failed, error_of(error));
      throw;
    }
    end(op, blocking, stack);
  }

 private:
  const c10::IValue& argument(c10::Stack* stack, int index) const {
    return (*stack)[stack->size() - arguments_ + size_t(index)];
  }

  Held start(c10::Stack* stack) const {
    const auto group = custom<Group>(argument(stack, group_));
    int64_t nbytes = -1;
    const at::Tensor* tensor = nullptr;
    if (size_ >= 0) {
      nbytes = bytes_of(argument(stack, size_));
      tensor = first_tensor(argument(stack, size_));
      if (nbytes == 0 && share_ >= 0) {
        nbytes = bytes_of(argument(stack, share_)) * group->getSize();
      }
      if (!tensor && share_ >= 0) {
        tensor = first_tensor(argument(stack, share_));
      }
    }
    py::gil_scoped_acquire lock;
    try {
      const py::object on_device = tensor && !tensor->is_cpu() ? py::cast(*tensor) : py::none();
      py::object op = python->dispatched(py::handle(op_.get()), nbytes, group, on_device);
      return op.is_none() ? nullptr : hold(std::move(op));
    } catch (py::error_already_set& error) {
      error.discard_as_unraisable("deep500_timing_torch.comm");
      return nullptr;
    }
  }

  // Whether Python shows it as a plain Work: a class of its own has methods that a wrapper lacks.
  static bool is_plain(const c10::intrusive_ptr<Work>& work) {
    static auto* known = new std::unordered_map<std::type_index, bool>;  // used with the GIL held
    const Work& object = *work;
    const auto found = known->find(typeid(object));
    if (found != known->end()) {
      return found->second;
    }
    return (*known)[typeid(object)] = py::type::of(py::cast(work)).is(py::type::of<Work>());
  }

  static void follow(const Held& op, const c10::intrusive_ptr<Work>& work) {
    c10::intrusive_ptr<c10::ivalue::Future> future;
    try {
      future = work->getFuture();
    } catch (const std::exception&) {  // Not every backend has one.
    }
    if (!future) {
      tell(op, python->not_followed);
      return;
    }
    future->addCallback([op](c10::ivalue::Future& done) {
      if (Py_IsInitialized()) {
        py::gil_scoped_acquire lock;
        tell(op, python->ended, done.hasError());
      }
    });
  }

  void end(const Held& op, bool blocking, c10::Stack* stack) const {
    c10::intrusive_ptr<Work> work;
    if (returns_ && !stack->empty() && stack->back().isObject()) {
      work = custom<Work>(stack->back());
    }
    bool wrap = false;
    {
      py::gil_scoped_acquire lock;
      py::error_scope kept;
      if (work) {
        wrap = is_plain(work);
        if (tell(op, python->launched, wrap && blocking).ptr() == Py_True) {
          follow(op, work);
        }
      } else if (!returns_ || (blocking && !coalesced_)) {
        tell(op, python->called, 0);  // NCCL has no handle for an operation on the current stream.
      } else {
        tell(op, python->untimed);  // It is launched later, with others.
      }
    }
    if (wrap) {
      stack->back() = c10::IValue(c10::intrusive_ptr<Work>(c10::make_intrusive<TimedWork>(std::move(work), op)));
    }
  }

  size_t arguments_;
  Held op_;
  int group_ = -1, async_ = -1, size_ = -1, share_ = -1;
  bool returns_ = false, coalesced_ = false;
};

// --- for Python -------------------------------------------------------------------------------------------------------

std::unique_ptr<torch::Library>* library = new std::unique_ptr<torch::Library>;
auto* kernels = new std::vector<c10::BoxedKernel>;  // A call may still be in one when the library is gone.

void install(const py::object& dispatched, const py::object& op, const std::vector<Rule>& rules) {
  *python = {dispatched, op.attr("called"), op.attr("ended"), op.attr("end_wait"), op.attr("failed"),
             op.attr("launched"), op.attr("not_followed"), op.attr("start_wait"), op.attr("untimed")};
  auto made = std::make_unique<torch::Library>(
      torch::Library::IMPL, "c10d", c10::DispatchKey::BackendSelect, __FILE__, __LINE__);
  for (const Rule& rule : rules) {
    const std::string& name = std::get<0>(rule);
    if (auto found = c10::Dispatcher::singleton().findSchema({name, ""})) {  // Not every PyTorch has each of them.
      kernels->push_back(c10::BoxedKernel::makeFromFunctor(std::make_unique<Timed>(rule, found->schema())));
      made->impl(name.c_str(), torch::CppFunction::makeFromBoxedKernel(kernels->back()));
    }
  }
  *library = std::move(made);
}

void uninstall() {
  enabled = false;
  library->reset();
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.def("install", &install);
  module.def("uninstall", &uninstall);
  module.def("enable", [](bool on) { enabled = on; });
}
