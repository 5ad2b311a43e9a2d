// Sees every communication operation that PyTorch's dispatcher hands to a process group, whoever issued it.
//
// DDP's reducer, FSDP, DTensor, functional and compiled collectives call `c10d::...` operators from C++, past any patched
// Python function. A boxed kernel at the dispatch key BackendSelect stands above every backend's own kernel and below
// autograd, tracing and fake tensors: each operation that really runs passes it once, in inference mode as well.
//
// On the CPU nothing here takes the interpreter's lock: finished operations go into a bounded buffer, which a thread of
// Python's empties. On a device, or where a timer of Python's is to have the times, Python is asked before and after.

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

namespace py = pybind11;

namespace {

using Group = c10d::ProcessGroup;
using Work = c10d::Work;

int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// --- what is known of each operator -----------------------------------------------------------------------------------

// The argument whose bytes are the size of the message as nccl-tests counts it, and the one that is a rank's share of it
// where the former is empty, as on the ranks that are not the root.
struct Rule {
  const char* name;
  const char* size;
  const char* share;
};

constexpr std::array<Rule, 20> RULES{{
    {"c10d::allreduce_", "tensors", ""},
    {"c10d::allreduce_coalesced_", "tensors", ""},
    {"c10d::broadcast_", "tensors", ""},
    {"c10d::reduce_", "tensors", ""},
    {"c10d::allgather_", "output_tensors", ""},
    {"c10d::_allgather_base_", "output_tensor", ""},
    {"c10d::allgather_coalesced_", "output_lists", ""},
    {"c10d::allgather_into_tensor_coalesced_", "outputs", ""},
    {"c10d::reduce_scatter_", "input_tensors", ""},
    {"c10d::_reduce_scatter_base_", "input_tensor", ""},
    {"c10d::reduce_scatter_tensor_coalesced_", "inputs", ""},
    {"c10d::alltoall_", "input_tensors", ""},
    {"c10d::alltoall_base_", "input", ""},
    {"c10d::gather_", "output_tensors", "input_tensors"},
    {"c10d::scatter_", "input_tensors", "output_tensors"},
    {"c10d::send", "tensors", ""},
    {"c10d::recv_", "tensors", ""},
    {"c10d::recv_any_source_", "tensors", ""},
    {"c10d::barrier", "", ""},
    {"c10d::monitored_barrier_", "", ""},
}};

// --- what Python is told ----------------------------------------------------------------------------------------------

enum Kind : int64_t {
  BLOCKING = 0,  // an operation that was waited for in its call: start, end
  ISSUED = 1,    // the call of an asynchronous one: start, end
  DONE = 2,      // its completion: start, end
  WAITED = 3,    // a wait for it: start, end
  PAIRED = 4,    // its time, and how much of that was exposed
  FAILED = 5,    // an exception; start: whether it had been issued
  UNTIMED = 6,   // no time could be had; start: whether it had been issued
  BOUNDED = 7,   // its completion, known only not to be later: start, end
};

struct Message {
  int64_t kind, operation, group, nbytes, start_ns, end_ns, sequence;
};
static_assert(sizeof(Message) == 56);

constexpr size_t CAPACITY = 1 << 16;  // messages; 3.5 MiB

struct GroupInfo {
  c10::weak_intrusive_ptr<Group> reference;
  std::string name;
  int64_t size, rank;
  bool counts = true;     // whether its backend numbers its operations
  int64_t own = 0;        // a number of our own where it does not
  int64_t advanced = 0;   // how far the numbers went while operations were seen here
  std::array<bool, RULES.size()> no_future{};
};

struct Operation {
  size_t rule = 0;
  int64_t group = 0, nbytes = -1, start_ns = 0, sequence = -1;
  bool blocking = false;
  // Completion and wait end on different threads, in either order. All of these are guarded by State::mutex.
  bool finished = false, followed = false, waited = false;
  int64_t done_ns = 0, exposed_ns = 0;
  py::object run;  // what Python keeps of it, where Python times it; touched under the interpreter's lock only

  ~Operation() {
    if (run) {
      if (Py_IsInitialized()) {
        py::gil_scoped_acquire lock;
        run = py::object();
      } else {
        run.release();
      }
    }
  }
};
using Pointer = std::shared_ptr<Operation>;

struct Waitable {
  c10::weak_intrusive_ptr<Work> reference{c10::intrusive_ptr<Work>()};
  Pointer operation;
};

struct State {
  std::mutex mutex;
  std::vector<Message> messages;
  uint64_t dropped = 0;
  std::vector<GroupInfo> groups;
  std::unordered_map<Group*, int64_t> group_numbers;
  std::unordered_map<Work*, Waitable> works;
  size_t swept = 0;
  std::unordered_map<int, std::vector<Pointer>> backward;  // operations issued in a backward pass, by its graph task
};

// Never destroyed: threads of the backends and of Python outlive the end of the program's main function.
State* state = new State;
std::atomic<bool> enabled{false};
std::atomic<bool> by_python{false};
std::array<std::atomic<bool>, RULES.size()> wanted{};
thread_local int muted = 0;
py::object* begin = new py::object;  // Python's begin(rule, nbytes, group, device, blocking)

void put(const Message& message) {  // with the mutex held
  if (state->messages.size() >= CAPACITY) {
    ++state->dropped;
    return;
  }
  state->messages.push_back(message);
}

void put(const Operation& of, Kind kind, int64_t start_ns, int64_t end_ns) {
  put({kind, int64_t(of.rule), of.group, of.nbytes, start_ns, end_ns, of.sequence});
}

int64_t number_of(GroupInfo& info, Group& group) {
  if (info.counts) {
    try {
      return int64_t(group.getSequenceNumberForGroup());
    } catch (const std::exception&) {  // not every backend does
      info.counts = false;
    }
  }
  return -1;
}

int64_t group_number(const c10::intrusive_ptr<Group>& group) {  // with the mutex held
  auto found = state->group_numbers.find(group.get());
  if (found != state->group_numbers.end() && !state->groups[found->second].reference.expired()) {
    return found->second;
  }
  int64_t number = int64_t(state->groups.size());
  state->groups.push_back(
      {c10::weak_intrusive_ptr<Group>(group), group->getGroupName(), group->getSize(), group->getRank()});
  state->group_numbers[group.get()] = number;
  return number;
}

// --- sizes ------------------------------------------------------------------------------------------------------------

int64_t bytes_of(const at::Tensor& tensor) {
  if (!tensor.defined()) {
    return 0;
  }
  if (tensor.layout() == at::kSparse) {  // what travels are its indices and its values
    return int64_t(tensor._indices().nbytes() + tensor._values().nbytes());
  }
  return int64_t(tensor.nbytes());
}

int64_t bytes_of(const c10::IValue& value) {
  if (value.isTensor()) {
    return bytes_of(value.toTensor());
  }
  int64_t sum = 0;
  if (value.isTensorList()) {
    for (const at::Tensor& tensor : value.toTensorList()) {
      sum += bytes_of(tensor);
    }
  } else if (value.isList()) {
    for (const c10::IValue& inner : value.toListRef()) {
      sum += bytes_of(inner);
    }
  }
  return sum;
}

std::optional<at::Tensor> first_tensor(const c10::IValue& value) {
  if (value.isTensor()) {
    return value.toTensor();
  }
  if (value.isTensorList()) {
    auto list = value.toTensorList();
    return list.empty() ? std::nullopt : std::optional<at::Tensor>(list.get(0));
  }
  if (value.isList()) {
    for (const c10::IValue& inner : value.toListRef()) {
      if (auto found = first_tensor(inner)) {
        return found;
      }
    }
  }
  return std::nullopt;
}

// --- completion, waits, and the end of a backward pass ------------------------------------------------------------------

void pair(Operation& of) {  // with the mutex held, when both its time and its exposure are known
  put(of, PAIRED, of.done_ns - of.start_ns, of.exposed_ns);
}

void finish(const Pointer& of, int64_t end_ns, bool failed) {
  std::lock_guard<std::mutex> lock(state->mutex);
  if (of->finished) {
    return;
  }
  of->finished = true;
  of->done_ns = end_ns;
  if (failed) {
    put(*of, FAILED, of->blocking ? 0 : 1, 0);
  } else if (of->blocking) {
    put(*of, BLOCKING, of->start_ns, end_ns);
  } else {
    put(*of, DONE, of->start_ns, end_ns);
    if (of->waited) {
      pair(*of);
    }
  }
}

void waited(const Pointer& of, int64_t start_ns, int64_t end_ns, bool failed) {
  std::lock_guard<std::mutex> lock(state->mutex);
  if (of->waited) {
    return;
  }
  of->waited = true;
  if (failed) {
    if (!of->followed && !of->finished) {
      of->finished = true;
      put(*of, FAILED, of->blocking ? 0 : 1, 0);
    }
    return;
  }
  if (of->blocking) {
    if (!of->followed && !of->finished) {
      of->finished = true;
      put(*of, BLOCKING, of->start_ns, end_ns);
    }
    return;
  }
  of->exposed_ns = end_ns - start_ns;
  put(*of, WAITED, start_ns, end_ns);
  if (of->finished) {
    pair(*of);
  } else if (!of->followed) {
    of->finished = true;
    put(*of, BOUNDED, of->start_ns, end_ns);
  }
}

// DDP waits for its buckets in a callback at the end of the backward pass, from C++. The engine calls back in the order
// of asking: the first of ours, asked for with the first operation, comes before DDP's, and what it asks for after it.
void after_waits(const std::vector<Pointer>& operations, int64_t start_ns) {
  std::lock_guard<std::mutex> lock(state->mutex);
  int64_t reached_ns = start_ns;
  for (const Pointer& of : operations) {
    if (of->waited || !of->finished || of->blocking) {
      continue;
    }
    of->waited = true;
    of->exposed_ns = std::max<int64_t>(of->done_ns - reached_ns, 0);
    put(*of, WAITED, reached_ns, reached_ns + of->exposed_ns);
    pair(*of);
    reached_ns += of->exposed_ns;
  }
}

void watch_backward(const Pointer& of, int task) {
  bool first = false;
  decltype(state->backward) stale;  // what goes must go outside of the lock: it may ask for the interpreter's
  {
    std::lock_guard<std::mutex> lock(state->mutex);
    if (state->backward.size() > 64) {  // of backward passes that failed on their way
      stale.swap(state->backward);
    }
    auto& operations = state->backward[task];
    first = operations.empty();
    if (operations.size() < 4096) {
      operations.push_back(of);
    }
  }
  if (!first) {
    return;
  }
  auto& engine = torch::autograd::Engine::get_default_engine();
  engine.queue_callback([task, &engine] {
    int64_t start_ns = now_ns();
    std::vector<Pointer> operations;
    {
      std::lock_guard<std::mutex> lock(state->mutex);
      auto found = state->backward.find(task);
      if (found != state->backward.end()) {
        operations = std::move(found->second);
        state->backward.erase(found);
      }
    }
    engine.queue_callback([operations = std::move(operations), start_ns] { after_waits(operations, start_ns); });
  });
}

void remember(const c10::intrusive_ptr<Work>& work, const Pointer& of) {
  std::vector<Waitable> stale;  // outside of the lock, as above
  std::lock_guard<std::mutex> lock(state->mutex);
  if (++state->swept >= 1024) {  // handles that are gone without a wait
    state->swept = 0;
    for (auto at = state->works.begin(); at != state->works.end();) {
      if (at->second.reference.expired()) {
        stale.push_back(std::move(at->second));
        at = state->works.erase(at);
      } else {
        ++at;
      }
    }
  }
  Waitable& entry = state->works[work.get()];
  if (entry.operation) {
    stale.push_back(std::move(entry));
  }
  entry = Waitable{c10::weak_intrusive_ptr<Work>(work), of};
}

// --- the kernel ---------------------------------------------------------------------------------------------------------

class Timed final : public c10::OperatorKernel {
 public:
  Timed(size_t rule, const c10::FunctionSchema& schema) : rule_(rule), arguments_(schema.arguments().size()) {
    for (size_t i = 0; i < arguments_; ++i) {
      const std::string& name = schema.arguments()[i].name();
      if (name == "process_group") {
        group_ = int(i);
      } else if (name == "async_op") {
        async_ = int(i);
      }
      if (name == RULES[rule].size) {
        size_ = int(i);
      }
      if (name == RULES[rule].share) {
        share_ = int(i);
      }
    }
    returns_ = !schema.returns().empty();
  }

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, c10::Stack* stack) {
    const auto below = keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, c10::DispatchKey::BackendSelect);
    if (!enabled.load(std::memory_order_relaxed) || !wanted[rule_].load(std::memory_order_relaxed) || muted ||
        group_ < 0 || keys.has(c10::DispatchKey::Meta)) {
      op.redispatchBoxed(below, stack);
      return;
    }
    Pointer of;
    c10::intrusive_ptr<Group> group;
    int64_t before = -1;
    try {
      of = start(stack, group, before);
    } catch (const std::exception&) {
      of.reset();  // arguments of a form that nobody knew: the operation runs, unseen, and is counted as such
    }
    try {
      op.redispatchBoxed(below, stack);
    } catch (...) {
      if (of) {
        failed(of);
      }
      throw;
    }
    if (of) {
      try {
        end(of, *group, before, stack);
      } catch (const std::exception&) {
        std::lock_guard<std::mutex> lock(state->mutex);
        put(*of, UNTIMED, 0, 0);
      }
    }
  }

 private:
  const c10::IValue& argument(c10::Stack* stack, int index) const {
    return (*stack)[stack->size() - arguments_ + size_t(index)];
  }

  Pointer start(c10::Stack* stack, c10::intrusive_ptr<Group>& group, int64_t& before) const {
    auto of = std::make_shared<Operation>();
    of->rule = rule_;
    group = argument(stack, group_).toCustomClass<Group>();
    of->blocking = async_ >= 0 && !argument(stack, async_).toBool();
    if (size_ >= 0) {
      of->nbytes = bytes_of(argument(stack, size_));
      if (of->nbytes == 0 && share_ >= 0) {
        of->nbytes = bytes_of(argument(stack, share_)) * group->getSize();
      }
    }
    {
      std::lock_guard<std::mutex> lock(state->mutex);
      of->group = group_number(group);
      before = number_of(state->groups[of->group], *group);
    }
    std::optional<at::Tensor> tensor;
    if (size_ >= 0) {
      tensor = first_tensor(argument(stack, size_));
      if (!tensor && share_ >= 0) {
        tensor = first_tensor(argument(stack, share_));
      }
    }
    const bool on_device = tensor && tensor->defined() && !tensor->is_cpu();
    if (on_device || by_python.load(std::memory_order_relaxed)) {
      ask_python(of, group, on_device ? std::optional<at::Tensor>(tensor) : std::nullopt);
    } else {
      of->start_ns = now_ns();
    }
    return of;
  }

  static void ask_python(const Pointer& of, const c10::intrusive_ptr<Group>& group, std::optional<at::Tensor> tensor) {
    py::gil_scoped_acquire lock;
    try {
      of->run = (*begin)(of->rule, of->nbytes, group, tensor, of->blocking);
    } catch (py::error_already_set& error) {
      error.discard_as_unraisable("deep500_timing_torch.comm");
    }
    if (of->run.is_none()) {
      of->run = py::object();
    }
    of->start_ns = now_ns();
  }

  static void failed(const Pointer& of) {
    if (of->run) {
      py::gil_scoped_acquire lock;
      try {
        of->run.attr("failed")();
      } catch (py::error_already_set& error) {
        error.discard_as_unraisable("deep500_timing_torch.comm");
      }
      return;
    }
    std::lock_guard<std::mutex> lock(state->mutex);
    put(*of, FAILED, 0, 0);
  }

  void end(const Pointer& of, Group& group, int64_t before, c10::Stack* stack) const {
    const int64_t issued_ns = now_ns();
    c10::intrusive_ptr<Work> work;
    if (returns_ && !stack->empty() && stack->back().isObject()) {
      work = stack->back().toCustomClass<Work>();
    }
    bool future_known = true;
    {
      std::lock_guard<std::mutex> lock(state->mutex);
      GroupInfo& info = state->groups[of->group];
      const int64_t after = number_of(info, group);
      if (after >= 0) {
        of->sequence = after;
        info.advanced += before >= 0 ? after - before : 0;
      } else {
        of->sequence = ++info.own;
      }
      future_known = !info.no_future[of->rule];
    }
    if (of->run) {
      if (work) {
        remember(work, of);
      }
      py::gil_scoped_acquire lock;
      try {
        of->run.attr("issued")(work ? py::cast(work) : py::none(), of->sequence);
      } catch (py::error_already_set& error) {
        error.discard_as_unraisable("deep500_timing_torch.comm");
      }
      return;
    }
    if (!work) {  // it is over when the call is, or belongs to a batch that is issued later
      std::lock_guard<std::mutex> lock(state->mutex);
      of->finished = true;
      if (returns_) {
        put(*of, UNTIMED, 0, 0);
      } else {
        put(*of, BLOCKING, of->start_ns, issued_ns);
      }
      return;
    }
    if (!of->blocking) {
      std::lock_guard<std::mutex> lock(state->mutex);
      put(*of, ISSUED, of->start_ns, issued_ns);
    }
    c10::intrusive_ptr<c10::ivalue::Future> future;
    if (future_known) {
      try {
        future = work->getFuture();
      } catch (const std::exception&) {
      }
      if (!future) {
        std::lock_guard<std::mutex> lock(state->mutex);
        state->groups[of->group].no_future[of->rule] = true;
      }
    }
    of->followed = bool(future);
    if (!of->blocking || !future) {
      remember(work, of);
    }
    if (future) {
      future->addCallback([of](c10::ivalue::Future& done) { finish(of, now_ns(), done.hasError()); });
    }
    const int task = torch::autograd::get_current_graph_task_id();
    if (task != -1 && future && !of->blocking) {
      watch_backward(of, task);
    }
  }

  size_t rule_, arguments_;
  int group_ = -1, async_ = -1, size_ = -1, share_ = -1;
  bool returns_ = false;
};

// --- Work.wait, as Python calls it --------------------------------------------------------------------------------------

py::object* original_wait = new py::object;

Pointer found_for(PyObject* self) {
  try {
    Work* work = py::handle(self).cast<Work*>();
    Waitable entry;
    std::lock_guard<std::mutex> lock(state->mutex);
    auto at = state->works.find(work);
    if (at == state->works.end()) {
      return nullptr;
    }
    entry = std::move(at->second);
    state->works.erase(at);
    return entry.reference.expired() ? nullptr : entry.operation;
  } catch (const std::exception&) {
    return nullptr;
  }
}

extern "C" PyObject* timed_wait(PyObject*, PyObject* const* arguments, Py_ssize_t count, PyObject* names) {
  Pointer of = count > 0 ? found_for(arguments[0]) : nullptr;
  if (!of) {
    return PyObject_Vectorcall(original_wait->ptr(), arguments, size_t(count), names);
  }
  if (of->run) {
    // What start_wait gives, end_wait takes; whatever they do, the wait itself is the original one.
    py::object token;
    try {
      token = of->run.attr("start_wait")();
    } catch (py::error_already_set& error) {
      error.discard_as_unraisable("deep500_timing_torch.comm");
    }
    PyObject* result = PyObject_Vectorcall(original_wait->ptr(), arguments, size_t(count), names);
    py::error_scope kept;
    try {
      of->run.attr("end_wait")(token, result == nullptr);
    } catch (py::error_already_set& error) {
      error.discard_as_unraisable("deep500_timing_torch.comm");
    }
    return result;
  }
  const int64_t start_ns = now_ns();
  PyObject* result = PyObject_Vectorcall(original_wait->ptr(), arguments, size_t(count), names);
  const int64_t end_ns = now_ns();
  try {
    waited(of, start_ns, end_ns, result == nullptr);
  } catch (const std::exception&) {
  }
  return result;
}

PyMethodDef wait_method = {
    "wait",
    reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(timed_wait)),
    METH_FASTCALL | METH_KEYWORDS,
    "``torch.distributed.Work.wait``, timed."};

// --- for Python ---------------------------------------------------------------------------------------------------------

struct Installed {
  std::unique_ptr<torch::Library> library;
  std::vector<c10::BoxedKernel> kernels;  // a call on its way may still be in one
};
Installed* installed = new Installed;

std::vector<std::string> install(const py::object& asked) {
  *begin = asked;
  auto& dispatcher = c10::Dispatcher::singleton();
  std::vector<std::string> seen;
  auto library = std::make_unique<torch::Library>(
      torch::Library::IMPL, "c10d", c10::DispatchKey::BackendSelect, __FILE__, __LINE__);
  for (size_t i = 0; i < RULES.size(); ++i) {
    auto op = dispatcher.findSchema({RULES[i].name, ""});
    if (!op) {
      continue;
    }
    auto kernel = c10::BoxedKernel::makeFromFunctor(std::make_unique<Timed>(i, op->schema()));
    installed->kernels.push_back(kernel);
    library->impl(RULES[i].name, torch::CppFunction::makeFromBoxedKernel(std::move(kernel)));
    seen.emplace_back(RULES[i].name);
  }
  installed->library = std::move(library);
  return seen;
}

void uninstall() {
  enabled = false;
  installed->library.reset();
}

py::bytes take() {
  std::vector<Message> messages;
  {
    // The interpreter's lock stays held: a thread that must take it again when Python ends would be ended amid C++.
    std::lock_guard<std::mutex> lock(state->mutex);
    messages.swap(state->messages);
    state->messages.reserve(256);
  }
  return py::bytes(reinterpret_cast<const char*>(messages.data()), messages.size() * sizeof(Message));
}

py::tuple group_info(int64_t number) {
  c10::intrusive_ptr<Group> group;
  std::string name;
  int64_t size, rank, advanced;
  {
    std::lock_guard<std::mutex> lock(state->mutex);
    const GroupInfo& info = state->groups.at(size_t(number));
    group = info.reference.lock();
    name = info.name;
    size = info.size;
    rank = info.rank;
    advanced = info.advanced;
  }
  return py::make_tuple(group ? py::cast(group) : py::none(), name, size, rank, advanced);
}

void after_fork() {
  // A thread of the parent's may have held the lock; here it is nobody's.
  state = new State;
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.def("install", &install);
  module.def("uninstall", &uninstall);
  module.def("rules", [] {
    std::vector<std::string> names;
    for (const Rule& rule : RULES) {
      names.emplace_back(rule.name);
    }
    return names;
  });
  module.def("configure", [](bool on, bool python, const std::vector<bool>& mask) {
    for (size_t i = 0; i < RULES.size() && i < mask.size(); ++i) {
      wanted[i] = mask[i];
    }
    by_python = python;
    enabled = on;
  });
  module.def("mute", [](int by) { muted += by; });
  module.def("take", &take);
  module.def("dropped", [] { return state->dropped; });
  module.def("group_count", [] { return state->groups.size(); });
  module.def("group_info", &group_info);
  module.def("now_ns", &now_ns);
  module.def("after_fork", &after_fork);
  module.def("timed_wait", [](const py::object& original) {
    *original_wait = original;
    py::object function = py::reinterpret_steal<py::object>(PyCFunction_New(&wait_method, nullptr));
    return py::reinterpret_steal<py::object>(PyInstanceMethod_New(function.ptr()));
  });
  module.attr("CAPACITY") = CAPACITY;
}
