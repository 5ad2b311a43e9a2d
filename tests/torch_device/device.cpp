// A PyTorch accelerator without hardware: the PrivateUse1 backend, run against a virtual clock.
//
// Real torch.Event, torch.Stream and torch.accelerator calls end here instead of in a driver. One host clock ("now") and, per
// stream, the time at which the work queued so far will have ended ("tail"), both int64 nanoseconds, are the whole model:
// nothing runs, and nothing moves unless a test moves it. Every call is counted.
//
// The Python side is testdev.py; the semantics are described in __init__.py and pinned down by tests/torch/test_torch_device.py.

#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <deque>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

namespace py = pybind11;

namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::Stream;
using c10::StreamId;

constexpr DeviceType kType = DeviceType::PrivateUse1;
constexpr DeviceIndex kDevices = 2;
constexpr StreamId kPoolStreams = 32;  // ids 1..32 of each device, given in turn, to torch.Stream() too; 0 is the default
constexpr int64_t kNsPerMs = 1'000'000;
constexpr int64_t kResolutionNs = 500;  // of CUDA's events

struct Event {
  DeviceIndex device;
  int64_t created_epoch;
  int64_t epoch;     // of the last record; a timestamp means nothing after a reset
  int64_t stamp_ns;  // when the stream reaches the last record
  bool captured;     // the last record went into a graph and will never have a time
  pid_t process;     // whose context it belongs to
};

// As cudaStreamCaptureMode, of a capture and of a thread.
enum Mode : int { kGlobal, kThreadLocal, kRelaxed };

struct Capture {
  DeviceIndex device;
  StreamId stream;
  std::thread::id owner;
  Mode mode;
  bool invalidated;
};

enum Fault { kRecord, kQuery, kElapsed, kSynchronize, kStreamLookup, kFaults };
constexpr std::array<const char*, kFaults> kFaultNames{"record", "query", "elapsed", "synchronize", "stream_lookup"};

struct Counters {
  int64_t records, queries, elapsed_calls;
  int64_t event_synchronizes, stream_synchronizes, device_synchronizes;
  int64_t events_created, events_destroyed, events_alive;
  int64_t stream_lookups, device_lookups, stream_queries, streams_created, blocks, launches;
  int64_t records_while_capturing, queries_while_capturing, synchronizes_while_capturing, launches_while_capturing;
  int64_t set_devices, foreign_events_destroyed;
  int64_t full_queue_waits;
  int64_t faults;
};

struct State {
  std::mutex mutex;
  int64_t now_ns = 0;
  std::array<std::vector<int64_t>, kDevices> tails;  // [device][stream id] -> ns
  std::array<std::map<StreamId, std::deque<int64_t>>, kDevices> queued;  // when each work and event in a stream ends
  size_t queue_limit = 0;                                                // how many a stream holds; 0: any number
  std::array<StreamId, kDevices> next_pooled{};
  Counters counters{};
  std::array<int64_t, kFaults> pending_faults{};
  bool capture_everywhere = false;
  std::optional<std::pair<DeviceIndex, StreamId>> captured_stream;
  std::optional<Capture> capture;  // begun by begin_capture(); dies of what CUDA's would die of
  std::array<bool, kDevices> contexts{};
  bool float32_elapsed = true;
  bool streams_tell_captures = true;

  State() {
    for (auto& tails_of_device : tails) tails_of_device.assign(kPoolStreams + 1, 0);
  }

  bool capturing() const { return capture_everywhere || captured_stream.has_value() || capture.has_value(); }

  bool capturing(DeviceIndex device, StreamId stream) const {
    return capture_everywhere || captured_stream == std::make_pair(device, stream) ||
        (capture && capture->device == device && capture->stream == stream);
  }

  // A query or a wait: "potentially unsafe" for captures, as cudaThreadExchangeStreamCaptureMode explains them.
  void unsafe_call(Mode of_thread) {
    if (!capture) return;
    const bool own = capture->owner == std::this_thread::get_id();
    const bool forbidden = of_thread == kGlobal ? capture->mode == kGlobal || (own && capture->mode == kThreadLocal)
        : of_thread == kThreadLocal             ? own && capture->mode != kRelaxed
                                                : false;
    if (!forbidden) return;
    capture->invalidated = true;
    TORCH_CHECK(false, "testdev: operation not permitted when stream is capturing (900)");
  }

  int64_t& tail(DeviceIndex device, StreamId stream) {
    TORCH_CHECK(device >= 0 && device < kDevices, "testdev has no device ", static_cast<int>(device));
    TORCH_CHECK(
        stream >= 0 && stream < static_cast<StreamId>(tails[device].size()),
        "testdev:", static_cast<int>(device), " has no stream ", stream);
    return tails[device][stream];
  }

  // Whoever issues into a stream that is full waits until its head has passed, as CUDA's driver does.
  void wait_for_room(DeviceIndex device, StreamId stream) {
    if (queue_limit == 0) return;
    auto& queue = queued[device][stream];
    if (queue.size() >= queue_limit && queue.front() > now_ns) {
      now_ns = queue.front();
      ++counters.full_queue_waits;
    }
    while (!queue.empty() && queue.front() <= now_ns) queue.pop_front();
  }

  void issued(DeviceIndex device, StreamId stream, int64_t end_ns) {
    if (queue_limit != 0) queued[device][stream].push_back(end_ns);
  }

  void maybe_fail(Fault kind) {
    if (pending_faults[kind] == 0) return;
    --pending_faults[kind];
    ++counters.faults;
    TORCH_CHECK(false, "testdev: injected fault in ", kFaultNames[kind]);
  }
};

// Never destroyed: events outlive every destructor that could run at interpreter exit.
State& state() {
  static State* const instance = new State();
  return *instance;
}

// Outside the mutex, since every thread compares it with its own copy; incremented only by reset().
std::atomic<int64_t> epoch{0};

using Lock = std::lock_guard<std::mutex>;

// As in CUDA, the current device, and each device's current stream, belong to the thread.
struct ThreadState {
  int64_t epoch = -1;
  DeviceIndex device = 0;
  std::array<StreamId, kDevices> streams{};
  Mode mode = kGlobal;
};

ThreadState& this_thread() {
  thread_local ThreadState mine;
  const int64_t now = epoch.load(std::memory_order_acquire);
  if (mine.epoch != now) {
    mine = ThreadState{};
    mine.epoch = now;
  }
  return mine;
}

DeviceIndex checked_index(Device device) {
  TORCH_CHECK(device.type() == kType, "testdev was asked about a device of type ", device.type());
  const DeviceIndex index = device.has_index() ? device.index() : this_thread().device;
  TORCH_CHECK(
      index >= 0 && index < kDevices, "testdev has no device ", static_cast<int>(index), ", it has ",
      static_cast<int>(kDevices));
  return index;
}

Stream make_stream(DeviceIndex device, StreamId id) {
  return Stream(Stream::UNSAFE, Device(kType, device), id);
}

Event* readable(void* event) {
  auto* e = static_cast<Event*>(event);
  TORCH_CHECK(!e->captured, "testdev: the event was recorded while its stream was capturing; it can never be read");
  return e;
}

// Requires the mutex. An event of before the last reset counts as done.
bool is_done(const State& s, const Event& e) {
  return e.epoch != epoch.load(std::memory_order_relaxed) || s.now_ns >= e.stamp_ns;
}

struct GuardImpl final : c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return kType; }

  Device exchangeDevice(Device device) const override {
    const DeviceIndex index = checked_index(device);
    return Device(kType, std::exchange(this_thread().device, index));
  }

  Device getDevice() const override {
    {
      State& s = state();
      Lock lock(s.mutex);
      ++s.counters.device_lookups;
    }
    return Device(kType, this_thread().device);
  }

  void setDevice(Device device) const override {
    State& s = state();
    Lock lock(s.mutex);
    make_current(s, checked_index(device));
  }

  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.index() >= 0 && device.index() < kDevices) this_thread().device = device.index();
  }

  DeviceIndex deviceCount() const noexcept override { return kDevices; }

  Stream getStream(Device device) const override {
    const DeviceIndex index = checked_index(device);
    {
      State& s = state();
      Lock lock(s.mutex);
      ++s.counters.stream_lookups;
      s.maybe_fail(kStreamLookup);
    }
    return make_stream(index, this_thread().streams[index]);
  }

  Stream getDefaultStream(Device device) const override { return make_stream(checked_index(device), 0); }

  Stream getStreamFromGlobalPool(Device device, bool) const override {
    const DeviceIndex index = checked_index(device);
    State& s = state();
    Lock lock(s.mutex);
    return make_stream(index, 1 + s.next_pooled[index]++ % kPoolStreams);
  }

  Stream getNewStream(Device device, int) const override {
    const DeviceIndex index = checked_index(device);
    State& s = state();
    Lock lock(s.mutex);
    ++s.counters.streams_created;
    return make_stream(index, 1 + s.next_pooled[index]++ % kPoolStreams);
  }

  Stream exchangeStream(Stream stream) const override {
    const DeviceIndex index = checked_index(stream.device());
    {
      State& s = state();
      Lock lock(s.mutex);
      s.tail(index, stream.id());
    }
    return make_stream(index, std::exchange(this_thread().streams[index], stream.id()));
  }

  bool queryStream(const Stream& stream) const override {
    State& s = state();
    Lock lock(s.mutex);
    ++s.counters.stream_queries;
    return s.tail(stream.device_index(), stream.id()) <= s.now_ns;
  }

  void synchronizeStream(const Stream& stream) const override {
    State& s = state();
    Lock lock(s.mutex);
    count_synchronize(s, s.counters.stream_synchronizes);
    s.now_ns = std::max(s.now_ns, s.tail(stream.device_index(), stream.id()));
  }

  // Without `override`: older releases of torch do not have it.
  bool isStreamCapturing(const Stream& stream) const {
    State& s = state();
    Lock lock(s.mutex);
    TORCH_CHECK(s.streams_tell_captures, "testdev: streams of before 2.12 cannot say whether they are captured");
    return s.capturing(stream.device_index(), stream.id());
  }

  void synchronizeDevice(const DeviceIndex device) const override {
    const DeviceIndex index = checked_index(Device(kType, device));
    State& s = state();
    Lock lock(s.mutex);
    count_synchronize(s, s.counters.device_synchronizes);
    s.now_ns = std::max(s.now_ns, *std::max_element(s.tails[index].begin(), s.tails[index].end()));
  }

  void record(void** event, const Stream& stream, const DeviceIndex, const c10::EventFlag) const override {
    State& s = state();
    Lock lock(s.mutex);
    ++s.counters.records;
    const bool captured = s.capturing(stream.device_index(), stream.id());
    if (captured) ++s.counters.records_while_capturing;
    // As CUDAGuardImpl::record has it: on the stream's device, and back only if nothing is thrown.
    const DeviceIndex before = this_thread().device;
    make_current(s, stream.device_index());
    s.maybe_fail(kRecord);
    if (!captured) s.wait_for_room(stream.device_index(), stream.id());
    const int64_t stamp_ns = std::max(s.tail(stream.device_index(), stream.id()), s.now_ns);
    const int64_t this_epoch = epoch.load(std::memory_order_relaxed);
    auto* e = static_cast<Event*>(*event);
    if (e == nullptr) {
      e = new Event{stream.device_index(), this_epoch, this_epoch, 0, false, getpid()};
      *event = e;
      ++s.counters.events_created;
      ++s.counters.events_alive;
    }
    TORCH_CHECK(
        e->device == stream.device_index(), "testdev: an event of device ", static_cast<int>(e->device),
        " was recorded on a stream of device ", static_cast<int>(stream.device_index()));
    e->epoch = this_epoch;
    e->stamp_ns = stamp_ns;
    e->captured = captured;
    if (!captured) s.issued(stream.device_index(), stream.id(), stamp_ns);
    make_current(s, before);
  }

  void destroyEvent(void* event, const DeviceIndex) const noexcept override {
    auto* e = static_cast<Event*>(event);
    if (e == nullptr) return;
    {
      State& s = state();
      Lock lock(s.mutex);
      if (e->process != getpid()) ++s.counters.foreign_events_destroyed;
      if (e->created_epoch == epoch.load(std::memory_order_relaxed)) {
        ++s.counters.events_destroyed;
        --s.counters.events_alive;
      }
    }
    delete e;
  }

  void block(void* event, const Stream& stream) const override {
    if (event == nullptr) return;
    State& s = state();
    Lock lock(s.mutex);
    ++s.counters.blocks;
    const auto* e = static_cast<const Event*>(event);
    int64_t& tail = s.tail(stream.device_index(), stream.id());
    if (!e->captured && !is_done(s, *e)) tail = std::max(tail, e->stamp_ns);
  }

  bool queryEvent(void* event) const override {
    State& s = state();
    Lock lock(s.mutex);
    ++s.counters.queries;
    if (s.capturing()) ++s.counters.queries_while_capturing;
    s.unsafe_call(this_thread().mode);
    s.maybe_fail(kQuery);
    return event == nullptr || is_done(s, *readable(event));
  }

  void synchronizeEvent(void* event) const override {
    State& s = state();
    Lock lock(s.mutex);
    count_synchronize(s, s.counters.event_synchronizes);
    if (event == nullptr) return;
    const Event* e = readable(event);
    if (!is_done(s, *e)) s.now_ns = e->stamp_ns;
  }

  double elapsedTime(void* start, void* end, const DeviceIndex) const override {
    State& s = state();
    Lock lock(s.mutex);
    ++s.counters.elapsed_calls;
    TORCH_CHECK(start != nullptr && end != nullptr, "testdev: elapsed time of an event that was never recorded");
    // As CUDAGuardImpl::elapsedTime has it: on the start's device, and back only if nothing is thrown.
    const DeviceIndex before = this_thread().device;
    make_current(s, static_cast<Event*>(start)->device);
    s.maybe_fail(kElapsed);
    const Event *a = readable(start), *b = readable(end);
    TORCH_CHECK(
        a->device == b->device, "testdev: elapsed time between events of device ", static_cast<int>(a->device),
        " and device ", static_cast<int>(b->device));
    TORCH_CHECK(a->epoch == b->epoch, "testdev: elapsed time between events with a reset between them");
    TORCH_CHECK(is_done(s, *a) && is_done(s, *b), "testdev: elapsed time of events that are not done");
    make_current(s, before);
    const int64_t unit_ns = s.float32_elapsed ? kResolutionNs : 1;
    const int64_t ns = (b->stamp_ns / unit_ns - a->stamp_ns / unit_ns) * unit_ns;
    const double ms = static_cast<double>(ns) / static_cast<double>(kNsPerMs);
    return s.float32_elapsed ? static_cast<double>(static_cast<float>(ms)) : ms;
  }

 private:
  // As cudaSetDevice, which since CUDA 12 makes the device's context.
  static void make_current(State& s, DeviceIndex device) {
    ++s.counters.set_devices;
    s.contexts[device] = true;
    this_thread().device = device;
  }

  static void count_synchronize(State& s, int64_t& counter) {
    ++counter;
    if (s.capturing()) ++s.counters.synchronizes_while_capturing;
    s.unsafe_call(this_thread().mode);
    s.maybe_fail(kSynchronize);
  }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  void init() const override {}
  DeviceIndex deviceCount() const override { return kDevices; }
  DeviceIndex getCurrentDevice() const override { return this_thread().device; }
  void setCurrentDevice(DeviceIndex device) const override { this_thread().device = checked_index(Device(kType, device)); }
  DeviceIndex exchangeDevice(DeviceIndex device) const override {
    return std::exchange(this_thread().device, checked_index(Device(kType, device)));
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override {
    return device < 0 ? this_thread().device : exchangeDevice(device);
  }
  Device getDeviceFromPtr(void*) const override { TORCH_CHECK(false, "testdev has no memory, so no pointer is on it"); }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, GuardImpl);

// A fork while another thread holds the mutex would leave it locked for ever in the child.
void before_fork() { state().mutex.lock(); }
void after_fork() { state().mutex.unlock(); }

std::tuple<int64_t, int64_t> launch(int64_t duration_ns, DeviceIndex device, StreamId stream) {
  TORCH_CHECK_VALUE(duration_ns >= 0, "launch() needs duration_ns >= 0, got ", duration_ns);
  State& s = state();
  Lock lock(s.mutex);
  int64_t& tail = s.tail(device, stream);
  if (!s.capturing(device, stream)) s.wait_for_room(device, stream);
  const int64_t start_ns = std::max(tail, s.now_ns);
  if (s.capturing(device, stream)) {  // goes into the graph; the device does nothing
    ++s.counters.launches_while_capturing;
    return {start_ns, start_ns};
  }
  ++s.counters.launches;
  tail = start_ns + duration_ns;
  s.issued(device, stream, tail);
  return {start_ns, tail};
}

int64_t advance(int64_t ns) {
  TORCH_CHECK_VALUE(ns >= 0, "advance() needs ns >= 0 (the clock never goes back), got ", ns);
  State& s = state();
  Lock lock(s.mutex);
  return s.now_ns += ns;
}

int64_t now_ns() {
  State& s = state();
  Lock lock(s.mutex);
  return s.now_ns;
}

int64_t tail_ns(DeviceIndex device, StreamId stream) {
  State& s = state();
  Lock lock(s.mutex);
  return s.tail(device, stream);
}

int64_t drain() {
  State& s = state();
  Lock lock(s.mutex);
  for (const auto& tails : s.tails) s.now_ns = std::max(s.now_ns, *std::max_element(tails.begin(), tails.end()));
  return s.now_ns;
}

void set_capturing(bool on, std::optional<std::pair<DeviceIndex, StreamId>> stream) {
  State& s = state();
  Lock lock(s.mutex);
  if (on && stream) s.tail(stream->first, stream->second);
  s.capture_everywhere = on && !stream;
  s.captured_stream = on ? stream : std::nullopt;
}

void begin_capture(DeviceIndex device, StreamId stream, int mode) {
  State& s = state();
  Lock lock(s.mutex);
  TORCH_CHECK(!s.capture, "testdev: one capture at a time");
  TORCH_CHECK(stream != 0, "testdev: the default stream cannot be captured");
  s.tail(device, stream);
  s.capture = Capture{device, stream, std::this_thread::get_id(), static_cast<Mode>(mode), false};
}

void end_capture() {
  State& s = state();
  Lock lock(s.mutex);
  TORCH_CHECK(s.capture, "testdev: no capture is under way");
  const bool invalidated = s.capture->invalidated;
  s.capture.reset();
  TORCH_CHECK(!invalidated, "testdev: operation failed due to a previous error during capture (901)");
}

void fail_next(const std::string& kind, int64_t n) {
  TORCH_CHECK_VALUE(n >= 0, "fail_next() needs n >= 0, got ", n);
  const auto found = std::find(kFaultNames.begin(), kFaultNames.end(), kind);
  TORCH_CHECK_VALUE(
      found != kFaultNames.end(), "fail_next() knows record, query, elapsed, synchronize and stream_lookup, not '", kind,
      "'");
  State& s = state();
  Lock lock(s.mutex);
  s.pending_faults[found - kFaultNames.begin()] = n;
}

void set_float32_elapsed(bool on) {
  State& s = state();
  Lock lock(s.mutex);
  s.float32_elapsed = on;
}

void set_queue_limit(size_t limit) {
  State& s = state();
  Lock lock(s.mutex);
  s.queue_limit = limit;
  s.queued = {};
}

void reset_counters() {
  State& s = state();
  Lock lock(s.mutex);
  const int64_t alive = s.counters.events_alive;
  s.counters = Counters{};
  s.counters.events_alive = alive;
}

void reset() {
  State& s = state();
  Lock lock(s.mutex);
  s.now_ns = 0;
  for (auto& tails : s.tails) std::fill(tails.begin(), tails.end(), 0);
  s.queued = {};
  s.queue_limit = 0;
  s.next_pooled = {};
  s.counters = Counters{};
  s.pending_faults = {};
  s.capture_everywhere = false;
  s.captured_stream.reset();
  s.capture.reset();
  s.contexts = {};
  s.float32_elapsed = true;
  s.streams_tell_captures = true;
  epoch.fetch_add(1, std::memory_order_release);
}

std::map<std::string, int64_t> counters() {
  State& s = state();
  Lock lock(s.mutex);
  const Counters& c = s.counters;
#define ENTRY(name) {#name, c.name}
  return {
      ENTRY(records), ENTRY(queries), ENTRY(elapsed_calls), ENTRY(event_synchronizes), ENTRY(stream_synchronizes),
      ENTRY(device_synchronizes), ENTRY(events_created), ENTRY(events_destroyed), ENTRY(events_alive),
      ENTRY(stream_lookups), ENTRY(device_lookups), ENTRY(stream_queries), ENTRY(streams_created), ENTRY(blocks),
      ENTRY(launches), ENTRY(records_while_capturing), ENTRY(queries_while_capturing),
      ENTRY(synchronizes_while_capturing), ENTRY(launches_while_capturing), ENTRY(set_devices),
      ENTRY(foreign_events_destroyed), ENTRY(full_queue_waits), ENTRY(faults)};
#undef ENTRY
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  at::RegisterPrivateUse1HooksInterface(new Hooks());  // torch keeps the pointer for good
  pthread_atfork(before_fork, after_fork, after_fork);
  m.attr("DEVICE_COUNT") = static_cast<int>(kDevices);
  m.def("launch", &launch);
  m.def("advance", &advance);
  m.def("now_ns", &now_ns);
  m.def("tail_ns", &tail_ns);
  m.def("drain", &drain);
  m.def("current_device", []() { return static_cast<int>(this_thread().device); });
  m.def("current_stream_id", [](DeviceIndex device) { return this_thread().streams[checked_index(Device(kType, device))]; });
  m.def("set_capturing", &set_capturing);
  m.def("is_capturing", [](DeviceIndex device, StreamId stream) {
    State& s = state();
    Lock lock(s.mutex);
    return s.capturing(device, stream);
  });
  m.def("begin_capture", &begin_capture);
  m.def("end_capture", &end_capture);
  m.def("exchange_capture_mode", [](int mode) { return static_cast<int>(std::exchange(this_thread().mode, static_cast<Mode>(mode))); });
  m.def("set_streams_tell_captures", [](bool on) {
    State& s = state();
    Lock lock(s.mutex);
    s.streams_tell_captures = on;
  });
  m.def("contexts", []() {
    State& s = state();
    Lock lock(s.mutex);
    return std::vector<bool>(s.contexts.begin(), s.contexts.end());
  });
  m.def("is_current_stream_capturing", []() {
    const ThreadState& mine = this_thread();
    State& s = state();
    Lock lock(s.mutex);
    return s.capturing(mine.device, mine.streams[mine.device]);
  });
  m.def("fail_next", &fail_next);
  m.def("set_float32_elapsed", &set_float32_elapsed);
  m.def("set_queue_limit", &set_queue_limit);
  m.def("counters", &counters);
  m.def("reset_counters", &reset_counters);
  m.def("reset", &reset);
}
