// Sees every communication operation that PyTorch's dispatcher hands to a process group, whoever issued it.
//
// DDP's reducer, FSDP, DTensor, functional and compiled collectives call `c10d::...` operators from C++, past any patched
// Python function. A boxed kernel at the dispatch key BackendSelect stands above every backend's own kernel and below
// autograd, tracing and fake tensors: each operation that really runs passes it once, in inference mode as well. A second
// one stands at the functional collectives, whose results are waited for in C++, by their storage.
//
// On the CPU nothing here takes the interpreter's lock: finished operations go into a bounded buffer, which a thread of
// Python's empties. On a device, or where a timer of Python's is to have the times, Python is asked before and after.

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
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
  ENDED = 8,     // an asynchronous one that was over when its call was: start, end
  LATER = 9,     // a wait for such a one: start, end, and in place of the number its time
};

struct Message {
  int64_t kind, operation, group, nbytes, start_ns, end_ns, sequence;
};
static_assert(sizeof(Message) == 56);

constexpr size_t CAPACITY = 1 << 16;  // messages; 3.5 MiB

struct GroupInfo {
  GroupInfo(std::string name, int64_t size, int64_t rank) : name(std::move(name)), size(size), rank(rank) {}

  std::string name;
  int64_t size, rank;
  int64_t number = 0;                // of this entry
  std::atomic<bool> counts{true};    // whether its backend numbers its operations
  int64_t own = 0;                   // a number of our own where it does not
  int64_t advanced = 0;              // how far the numbers went while operations were seen here
  std::array<std::atomic<bool>, RULES.size()> no_future{}, no_number{};
};

// What is known of an operation when its call begins.
struct Call {
  size_t rule = 0;
  int64_t group = 0, nbytes = -1, start_ns = 0, sequence = -1;
  bool blocking = false;
};

// One that was not over when its call was, or that is told of elsewhere.
struct Operation : Call {
  explicit Operation(const Call& call) : Call(call) {}

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

// What is to be known when somebody waits for an operation by its handle.
struct Handle {
  const Work* work = nullptr;
  // With the address, this tells a handle from one that is gone: a reference, however weak, would keep its tensors.
  uint64_t number = 0;
  bool numbered = false;
  uint64_t age = 0;
  Pointer operation;  // none if it was over when its call was:
  Call call;
  int64_t duration_ns = 0;
};

// The latest handles, in sets by their addresses, in each of which a new one takes the place of the oldest.
class Handles {
 public:
  // The place of a handle, null if it has none.
  Handle* find(const Work* work) {
    Handle* set = set_of(work);
    for (size_t i = 0; i < WAYS; ++i) {
      if (set[i].work == work) {
        return &set[i];
      }
    }
    return nullptr;
  }

  // Keeps a handle, and leaves in its place what it drove out.
  void put(Handle& handle) {
    Handle* set = set_of(handle.work);
    Handle* place = set;
    for (size_t i = 0; i < WAYS; ++i) {
      if (set[i].work == handle.work) {
        place = &set[i];
        break;
      }
      if (set[i].age < place->age) {
        place = &set[i];
      }
    }
    handle.age = ++age_;
    count += place->work == nullptr;
    std::swap(*place, handle);
  }

  // Takes one out.
  Handle take(Handle& place) {
    Handle taken;
    std::swap(place, taken);
    --count;
    return taken;
  }

  std::atomic<int64_t> count{0};

 private:
  static constexpr size_t WAYS = 8, SETS = 256;
  Handle* set_of(const Work* work) {
    return &places_[WAYS * ((reinterpret_cast<uintptr_t>(work) >> 4) * 0x9E3779B97F4A7C15u >> 56)];
  }
  uint64_t age_ = 0;
  std::vector<Handle> places_{WAYS * SETS};
};

constexpr size_t MOST_RESULTS = 4096;  // of functional collectives, for which nobody has waited

struct State {
  State() {
    messages.reserve(CAPACITY);
    taken.reserve(CAPACITY);
  }

  std::mutex mutex;
  std::vector<Message> messages, taken;
  uint64_t dropped = 0;
  std::deque<GroupInfo> groups;
  std::unordered_map<Group*, GroupInfo*> group_infos;  // of those that Python has not told to be gone
  std::atomic<int64_t> group_age{0};                     // how often it has
  Handles works;
  std::unordered_map<const void*, std::vector<Pointer>> results;  // by the storage of what they give
  std::atomic<int64_t> result_count{0}, python_count{0};
  std::unordered_map<int, std::vector<Pointer>> backward;  // operations issued in a backward pass, by its graph task
};

// Never destroyed: threads of the backends and of Python outlive the end of the program's main function.
State* state = new State;
std::atomic<bool> enabled{false};
std::atomic<bool> by_python{false};
std::array<std::atomic<bool>, RULES.size()> wanted{};
thread_local int muted = 0;
thread_local std::vector<Pointer>* issued_here = nullptr;  // what a functional collective issues while it runs
py::object* begin = new py::object;  // Python's begin(rule, nbytes, group, device, blocking)
py::object* meet = new py::object;   // Python's meet(number, group), who then says when the group is gone

void put(const Message& message) {  // with the mutex held
  if (state->messages.size() >= CAPACITY) {
    ++state->dropped;
    return;
  }
  state->messages.push_back(message);
}

void put(const Call& of, Kind kind, int64_t start_ns, int64_t end_ns) {
  put({kind, int64_t(of.rule), of.group, of.nbytes, start_ns, end_ns, of.sequence});
}

int64_t number_of(GroupInfo& info, Group& group) {
  if (info.counts.load(std::memory_order_relaxed)) {
    try {
      return int64_t(group.getSequenceNumberForGroup());
    } catch (const std::exception&) {  // not every backend does
      info.counts = false;
    }
  }
  return -1;
}

// A reference of ours to a group, however weak, would keep its threads and connections: Python says when it is gone.
GroupInfo& meet_group(const c10::intrusive_ptr<Group>& group) {
  GroupInfo* known = nullptr;
  std::string name = group->getGroupName();  // of a group that Python made these ask for the interpreter
  const int64_t size = group->getSize(), rank = group->getRank();
  {
    std::lock_guard<std::mutex> lock(state->mutex);
    GroupInfo*& place = state->group_infos[group.get()];
    if (place) {
      return *place;
    }
    known = place = &state->groups.emplace_back(std::move(name), size, rank);
    known->number = int64_t(state->groups.size()) - 1;
  }
  py::gil_scoped_acquire lock;
  try {
    (*meet)(known->number, group);
  } catch (py::error_already_set& error) {
    error.discard_as_unraisable("deep500_timing_torch.comm");
  }
  return *known;
}

GroupInfo& info_of(const c10::intrusive_ptr<Group>& group) {
  thread_local State* of = nullptr;
  thread_local int64_t age = 0;
  thread_local Group* last_group = nullptr;
  thread_local GroupInfo* last = nullptr;
  const int64_t now = state->group_age.load(std::memory_order_acquire);
  if (last_group != group.get() || age != now || of != state) {
    of = state, age = now, last = &meet_group(group), last_group = group.get();
  }
  return *last;
}

void forget_group(int64_t number) {
  std::lock_guard<std::mutex> lock(state->mutex);
  for (auto at = state->group_infos.begin(); at != state->group_infos.end(); ++at) {
    if (at->second->number == number) {
      state->group_infos.erase(at);
      ++state->group_age;
      return;
    }
  }
}

// The object of a class that the operator's schema names; to ask for the class as well costs more than all else here.
template <class T>
c10::intrusive_ptr<T> custom(const c10::IValue& value) {
  return c10::static_intrusive_pointer_cast<T>(value.toObjectRef().getSlot(0).toCapsule());
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

template <class Do>
void for_each_storage(const c10::IValue& value, const Do& todo) {
  if (value.isTensor()) {
    if (value.toTensor().defined() && value.toTensor().has_storage()) {
      todo(value.toTensor().storage().unsafeGetStorageImpl());
    }
  } else if (value.isList()) {
    for (const c10::IValue& inner : value.toListRef()) {
      for_each_storage(inner, todo);
    }
  }
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

// Nobody can wait for it any more whose wait would be seen.
void lost(const Handle& handle) {  // with the mutex held
  const Pointer& of = handle.operation;
  if (!of) {
    return;
  }
  if (of->run) {
    --state->python_count;
  } else if (!of->followed && !of->finished) {
    of->finished = true;
    put(*of, UNTIMED, of->blocking ? 0 : 1, 0);
  }
}

void number(Handle& handle, GroupInfo& info, size_t rule) {
  if (info.no_number[rule].load(std::memory_order_relaxed)) {
    return;
  }
  try {
    handle.number = handle.work->getSequencenumber();
    handle.numbered = true;
  } catch (const std::exception&) {  // not every backend does
    info.no_number[rule] = true;
  }
}

// Whether it is the handle that was kept, rather than one that came to its address since.
bool same(const Handle& handle, const Work& work) {
  try {
    return !handle.numbered || handle.number == work.getSequencenumber();
  } catch (const std::exception&) {
    return false;
  }
}

void remember(const c10::intrusive_ptr<Work>& work, const Pointer& of, GroupInfo& info) {
  if (issued_here) {
    issued_here->push_back(of);
    return;
  }
  Handle handle;  // what goes must go outside of the lock: it may ask for the interpreter's
  handle.work = work.get();
  handle.operation = of;
  number(handle, info, of->rule);
  std::lock_guard<std::mutex> lock(state->mutex);
  state->python_count += bool(of->run);
  state->works.put(handle);
  lost(handle);
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
    Call call;
    Pointer of;  // only where Python times it
    c10::intrusive_ptr<Group> group;
    GroupInfo* info = nullptr;
    int64_t before = -1;
    try {
      info = start(stack, call, group, before, of);
    } catch (const std::exception&) {
      info = nullptr;  // arguments of a form that nobody knew: the operation runs, unseen, and is counted as such
    }
    try {
      op.redispatchBoxed(below, stack);
    } catch (...) {
      if (info) {
        failed(call, of);
      }
      throw;
    }
    if (info) {
      try {
        end(call, of, *info, *group, before, stack);
      } catch (const std::exception&) {
        std::lock_guard<std::mutex> lock(state->mutex);
        put(call, UNTIMED, 0, 0);
      }
    }
  }

 private:
  const c10::IValue& argument(c10::Stack* stack, int index) const {
    return (*stack)[stack->size() - arguments_ + size_t(index)];
  }

  GroupInfo* start(c10::Stack* stack, Call& call, c10::intrusive_ptr<Group>& group, int64_t& before, Pointer& of) const {
    call.rule = rule_;
    group = custom<Group>(argument(stack, group_));
    GroupInfo& info = info_of(group);
    call.group = info.number;
    call.blocking = async_ >= 0 && !argument(stack, async_).toBool();
    const at::Tensor* tensor = nullptr;
    if (size_ >= 0) {
      call.nbytes = bytes_of(argument(stack, size_));
      tensor = first_tensor(argument(stack, size_));
      if (call.nbytes == 0 && share_ >= 0) {
        call.nbytes = bytes_of(argument(stack, share_)) * info.size;
      }
      if (!tensor && share_ >= 0) {
        tensor = first_tensor(argument(stack, share_));
      }
    }
    before = number_of(info, *group);
    const bool on_device = tensor && !tensor->is_cpu();
    if (on_device || by_python.load(std::memory_order_relaxed)) {
      of = std::make_shared<Operation>(call);
      ask_python(of, group, on_device ? std::optional<at::Tensor>(*tensor) : std::nullopt);
      call.start_ns = of->start_ns;
      if (!of->run) {
        of.reset();
      }
    } else {
      call.start_ns = now_ns();
    }
    return &info;
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

  static void failed(const Call& call, const Pointer& of) {
    if (of) {
      py::gil_scoped_acquire lock;
      try {
        of->run.attr("failed")();
      } catch (py::error_already_set& error) {
        error.discard_as_unraisable("deep500_timing_torch.comm");
      }
      return;
    }
    std::lock_guard<std::mutex> lock(state->mutex);
    put(call, FAILED, 0, 0);
  }

  static void count(Call& call, GroupInfo& info, int64_t before, int64_t after) {  // with the mutex held
    if (after >= 0) {
      call.sequence = after;
      info.advanced += before >= 0 ? after - before : 0;
    } else {
      call.sequence = ++info.own;
    }
  }

  c10::intrusive_ptr<c10::ivalue::Future> future_of(Work& work, GroupInfo& info) const {
    c10::intrusive_ptr<c10::ivalue::Future> future;
    if (!info.no_future[rule_].load(std::memory_order_relaxed)) {
      try {
        future = work.getFuture();
      } catch (const std::exception&) {
      }
      if (!future) {
        info.no_future[rule_] = true;
      }
    }
    return future;
  }

  void end(Call& call, const Pointer& timed, GroupInfo& info, Group& group, int64_t before, c10::Stack* stack) const {
    const int64_t issued_ns = now_ns();
    const int64_t after = number_of(info, group);
    c10::intrusive_ptr<Work> work;
    if (returns_ && !stack->empty() && stack->back().isObject()) {
      work = custom<Work>(stack->back());
    }
    if (timed) {
      {
        std::lock_guard<std::mutex> lock(state->mutex);
        count(*timed, info, before, after);
      }
      if (work) {
        remember(work, timed, info);
      }
      py::gil_scoped_acquire lock;
      try {
        timed->run.attr("issued")(work ? py::cast(work) : py::none(), timed->sequence);
      } catch (py::error_already_set& error) {
        error.discard_as_unraisable("deep500_timing_torch.comm");
      }
      return;
    }
    if (!work) {  // it is over when the call is, or belongs to a batch that is issued later
      std::lock_guard<std::mutex> lock(state->mutex);
      count(call, info, before, after);
      if (returns_) {
        put(call, UNTIMED, 0, 0);
      } else {
        put(call, BLOCKING, call.start_ns, issued_ns);
      }
      return;
    }
    const c10::intrusive_ptr<c10::ivalue::Future> future = future_of(*work, info);
    const bool over = future && future->completed() && !future->hasError();
    const int task = call.blocking || !future || issued_here ? -1 : torch::autograd::get_current_graph_task_id();
    if (over && task == -1 && (call.blocking || !issued_here)) {
      Handle handle;
      if (!call.blocking) {
        handle.work = work.get();
        number(handle, info, call.rule);
        handle.duration_ns = issued_ns - call.start_ns;
      }
      std::lock_guard<std::mutex> lock(state->mutex);
      count(call, info, before, after);
      put(call, call.blocking ? BLOCKING : ENDED, call.start_ns, issued_ns);
      if (!call.blocking) {
        handle.call = call;
        state->works.put(handle);
        lost(handle);
      }
      return;
    }
    auto of = std::make_shared<Operation>(call);
    of->followed = bool(future);
    {
      std::lock_guard<std::mutex> lock(state->mutex);
      count(*of, info, before, after);
      call.sequence = of->sequence;
      if (!of->blocking) {
        put(*of, ISSUED, of->start_ns, issued_ns);
      }
    }
    if (!of->blocking || !future) {
      remember(work, of, info);
    }
    if (future) {
      future->addCallback([of](c10::ivalue::Future& done) { finish(of, now_ns(), done.hasError()); });
    }
    if (task != -1) {
      watch_backward(of, task);
    }
  }

  size_t rule_, arguments_;
  int group_ = -1, async_ = -1, size_ = -1, share_ = -1;
  bool returns_ = false;
};

// --- functional collectives ----------------------------------------------------------------------------------------------

constexpr std::array<const char*, 18> FUNCTIONAL{
    "all_reduce", "all_reduce_", "all_reduce_coalesced", "all_reduce_coalesced_", "all_gather_into_tensor",
    "all_gather_into_tensor_out", "all_gather_into_tensor_coalesced", "reduce_scatter_tensor",
    "reduce_scatter_tensor_out", "reduce_scatter_tensor_coalesced", "all_to_all_single", "broadcast", "broadcast_",
    "isend", "irecv", "batch_p2p_ops", "all_gather_single", "reduce_scatter_single"};
constexpr size_t MOST_OF_ONE = 16;  // operations on one storage, for which nobody has waited

c10::DispatchKeySet below_of(c10::DispatchKeySet keys) {
  return keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, c10::DispatchKey::BackendSelect);
}

// Keeps what a functional collective issues by the storage of what it gives.
class Functional final : public c10::OperatorKernel {
 public:
  explicit Functional(const c10::FunctionSchema& schema) : returns_(schema.returns().size()) {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, c10::Stack* stack) {
    if (!enabled.load(std::memory_order_relaxed) || muted || issued_here || keys.has(c10::DispatchKey::Meta)) {
      op.redispatchBoxed(below_of(keys), stack);
      return;
    }
    std::vector<Pointer> issued;
    {
      struct Scope {
        ~Scope() { issued_here = nullptr; }
      } scope;
      issued_here = &issued;
      op.redispatchBoxed(below_of(keys), stack);
    }
    if (!issued.empty()) {
      keep(issued, stack);
    }
  }

 private:
  void keep(const std::vector<Pointer>& issued, c10::Stack* stack) const {
    decltype(state->results) stale;  // outside of the lock, as above
    std::vector<Pointer> older;
    std::lock_guard<std::mutex> lock(state->mutex);
    if (state->results.size() >= MOST_RESULTS) {
      stale.swap(state->results);
    }
    for (size_t i = 0; i < returns_ && i < stack->size(); ++i) {
      for_each_storage((*stack)[stack->size() - 1 - i], [&](const void* storage) {
        auto& kept = state->results[storage];
        if (kept.size() >= MOST_OF_ONE) {
          older.insert(older.end(), kept.begin(), kept.end());
          kept.clear();
        }
        kept.insert(kept.end(), issued.begin(), issued.end());
      });
    }
    state->result_count = int64_t(state->results.size());
  }

  size_t returns_;
};

// What each of several has of a wait for all of them, one after the other.
void waited_for_all(const std::vector<Pointer>& operations, int64_t start_ns, int64_t end_ns, bool failed) {
  int64_t reached_ns = start_ns;
  for (size_t i = 0; i < operations.size(); ++i) {
    int64_t until_ns = end_ns;
    if (i + 1 < operations.size()) {
      std::lock_guard<std::mutex> lock(state->mutex);
      if (operations[i]->finished) {
        until_ns = std::clamp(operations[i]->done_ns, reached_ns, end_ns);
      }
    }
    waited(operations[i], reached_ns, until_ns, failed);
    reached_ns = until_ns;
  }
}

// ``wait_tensor``: whoever waits for a result of theirs.
class FunctionalWait final : public c10::OperatorKernel {
 public:
  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, c10::Stack* stack) {
    const std::vector<Pointer> operations = taken(stack);
    if (operations.empty()) {
      op.redispatchBoxed(below_of(keys), stack);
      return;
    }
    std::vector<py::object> tokens;
    before(operations, tokens);
    const int64_t start_ns = now_ns();
    try {
      op.redispatchBoxed(below_of(keys), stack);
    } catch (...) {
      after(operations, tokens, start_ns, now_ns(), true);
      throw;
    }
    after(operations, tokens, start_ns, now_ns(), false);
  }

 private:
  static std::vector<Pointer> taken(const c10::Stack* stack) {
    std::vector<Pointer> found;
    if (state->result_count.load(std::memory_order_relaxed) == 0 || stack->empty()) {
      return found;
    }
    for_each_storage(stack->back(), [&](const void* storage) {
      std::lock_guard<std::mutex> lock(state->mutex);
      auto at = state->results.find(storage);
      if (at != state->results.end()) {
        found = std::move(at->second);
        state->results.erase(at);
        state->result_count = int64_t(state->results.size());
      }
    });
    return found;
  }

  static void before(const std::vector<Pointer>& operations, std::vector<py::object>& tokens) {
    for (const Pointer& of : operations) {
      if (of->run) {
        py::gil_scoped_acquire lock;
        try {
          tokens.push_back(of->run.attr("start_wait")());
        } catch (py::error_already_set& error) {
          error.discard_as_unraisable("deep500_timing_torch.comm");
          tokens.push_back(py::none());
        }
      }
    }
  }

  static void after(
      const std::vector<Pointer>& operations, std::vector<py::object>& tokens, int64_t start_ns, int64_t end_ns,
      bool failed) {
    if (tokens.empty()) {
      waited_for_all(operations, start_ns, end_ns, failed);
      return;
    }
    py::gil_scoped_acquire lock;
    py::error_scope kept;
    size_t next = 0;
    for (const Pointer& of : operations) {
      if (of->run) {
        try {
          of->run.attr("end_wait")(tokens[next++], failed);
        } catch (py::error_already_set& error) {
          error.discard_as_unraisable("deep500_timing_torch.comm");
        }
      }
    }
    tokens.clear();
  }
};

// --- Work.wait, as Python calls it --------------------------------------------------------------------------------------

py::object* original_wait = new py::object;

// The object that a handle of Python's holds, null if it holds none.
Work* work_of(PyObject* self) {
  const auto* instance = reinterpret_cast<const py::detail::instance*>(self);
  if (instance->simple_layout) {
    return static_cast<Work*>(instance->simple_value_holder[0]);
  }
  try {
    return py::handle(self).cast<Work*>();
  } catch (const std::exception&) {
    return nullptr;
  }
}

Handle taken_of(const Work* work) {  // with the mutex held
  Handle* place = state->works.find(work);
  if (!place) {
    return Handle();
  }
  Handle found = state->works.take(*place);
  if (!same(found, *work)) {
    lost(found);
    found.work = nullptr;
  }
  return found;
}

PyObject* original_waits(PyObject* self, PyObject* const* arguments, Py_ssize_t count, PyObject* names) {
  std::array<PyObject*, 8> few;
  std::vector<PyObject*> many;
  const size_t all = size_t(count) + 1 + (names ? size_t(PyTuple_GET_SIZE(names)) : 0);
  PyObject** with_self = few.data();
  if (all > few.size()) {
    many.resize(all);
    with_self = many.data();
  }
  with_self[0] = self;
  std::copy(arguments, arguments + (all - 1), with_self + 1);
  return PyObject_Vectorcall(original_wait->ptr(), with_self, size_t(count) + 1, names);
}

PyObject* wait_in_python(
    const Pointer& of, PyObject* self, PyObject* const* arguments, Py_ssize_t count, PyObject* names) {
  // What start_wait gives, end_wait takes; whatever they do, the wait itself is the original one.
  py::object token;
  try {
    token = of->run.attr("start_wait")();
  } catch (py::error_already_set& error) {
    error.discard_as_unraisable("deep500_timing_torch.comm");
  }
  PyObject* result = original_waits(self, arguments, count, names);
  py::error_scope kept;
  try {
    of->run.attr("end_wait")(token, result == nullptr);
  } catch (py::error_already_set& error) {
    error.discard_as_unraisable("deep500_timing_torch.comm");
  }
  return result;
}

extern "C" PyObject* timed_wait(PyObject* self, PyObject* const* arguments, Py_ssize_t count, PyObject* names) {
  Work* work = state->works.count.load(std::memory_order_relaxed) ? work_of(self) : nullptr;
  if (!work) {
    return original_waits(self, arguments, count, names);
  }
  if (state->python_count.load(std::memory_order_relaxed)) {
    Handle found;
    {
      std::lock_guard<std::mutex> lock(state->mutex);
      Handle* place = state->works.find(work);
      if (place && place->operation && place->operation->run) {
        found = taken_of(work);
        state->python_count -= found.work != nullptr;
      }
    }
    if (found.work) {
      return wait_in_python(found.operation, self, arguments, count, names);
    }
  }
  const int64_t start_ns = now_ns();
  PyObject* result = original_waits(self, arguments, count, names);
  const int64_t end_ns = now_ns();
  Handle found;
  {
    std::lock_guard<std::mutex> lock(state->mutex);
    found = taken_of(work);
    if (found.work && !found.operation && result) {
      Call ended = found.call;
      ended.sequence = found.duration_ns;
      put(ended, LATER, start_ns, end_ns);
    }
  }
  if (found.work && found.operation) {
    waited(found.operation, start_ns, end_ns, result == nullptr);
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
  std::vector<std::unique_ptr<torch::Library>> libraries;
  std::vector<c10::BoxedKernel> kernels;  // a call on its way may still be in one
};
Installed* installed = new Installed;

template <class Kernel>
bool install(torch::Library& library, const std::string& name, Kernel&& make) {
  auto op = c10::Dispatcher::singleton().findSchema({name, ""});
  if (!op) {  // not every PyTorch has it
    return false;
  }
  auto kernel = c10::BoxedKernel::makeFromFunctor(make(op->schema()));
  installed->kernels.push_back(kernel);
  library.impl(name.c_str(), torch::CppFunction::makeFromBoxedKernel(std::move(kernel)));
  return true;
}

std::vector<std::string> install_all(const py::object& to_begin, const py::object& to_meet) {
  *begin = to_begin;
  *meet = to_meet;
  std::vector<std::string> seen;
  auto library = std::make_unique<torch::Library>(
      torch::Library::IMPL, "c10d", c10::DispatchKey::BackendSelect, __FILE__, __LINE__);
  for (size_t i = 0; i < RULES.size(); ++i) {
    if (install(*library, RULES[i].name, [i](const auto& schema) { return std::make_unique<Timed>(i, schema); })) {
      seen.emplace_back(RULES[i].name);
    }
  }
  installed->libraries.push_back(std::move(library));
  library = std::make_unique<torch::Library>(
      torch::Library::IMPL, "_c10d_functional", c10::DispatchKey::BackendSelect, __FILE__, __LINE__);
  const std::string space = "_c10d_functional::";
  for (const char* name : FUNCTIONAL) {
    install(*library, space + name, [](const auto& schema) { return std::make_unique<Functional>(schema); });
  }
  install(*library, space + "wait_tensor", [](const auto&) { return std::make_unique<FunctionalWait>(); });
  installed->libraries.push_back(std::move(library));
  return seen;
}

void uninstall() {
  enabled = false;
  installed->libraries.clear();
}

py::bytes take() {
  {
    // The interpreter's lock stays held: a thread that must take it again when Python ends would be ended amid C++. It
    // also makes the buffer that was taken ours alone.
    std::lock_guard<std::mutex> lock(state->mutex);
    state->messages.swap(state->taken);
  }
  const auto& messages = state->taken;
  py::bytes found(reinterpret_cast<const char*>(messages.data()), messages.size() * sizeof(Message));
  state->taken.clear();
  return found;
}

py::tuple group_info(int64_t number) {
  std::string name;
  int64_t size, rank, advanced;
  {
    std::lock_guard<std::mutex> lock(state->mutex);  // in which nothing of Python's may run
    const GroupInfo& info = state->groups.at(size_t(number));
    name = info.name, size = info.size, rank = info.rank, advanced = info.advanced;
  }
  return py::make_tuple(name, size, rank, advanced);
}

void after_fork() {
  // A thread of the parent's may have held the lock; here it is nobody's.
  state = new State;
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.def("install", &install_all);
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
  module.def("forget_group", &forget_group);
  module.def("group_info", &group_info);
  module.def("now_ns", &now_ns);
  module.def("after_fork", &after_fork);
  module.def("timed_wait", [](const py::object& owner, const py::object& original) {
    // Without the wrapper that binds it, which would make a tuple of the arguments in each call.
    PyObject* function = PyInstanceMethod_Check(original.ptr()) ? PyInstanceMethod_GET_FUNCTION(original.ptr()) : nullptr;
    *original_wait = function ? py::reinterpret_borrow<py::object>(function) : original;
    auto* type = reinterpret_cast<PyTypeObject*>(owner.ptr());
    return py::reinterpret_steal<py::object>(PyDescr_NewMethod(type, &wait_method));
  });
  module.attr("CAPACITY") = CAPACITY;
}
