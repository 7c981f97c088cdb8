#include "kernels/paged_attention.h"

#include <omp.h>

#include <algorithm>
#include <vector>

#include "glog/logging.h"
#include "kernels/cpu/attention_tile.h"
#include "kernels/cpu/key_tile.h"

namespace zipage::cpu {
namespace {

// Slots whose softmax is accumulated on its own before it is merged into the row's: fixed, because
// the order of additions must not depend on how the work is shared out. A multiple of kTileSlots.
constexpr int kSegmentSlots = 2048;
// Query rows (tokens times group) that share a packed tile.
constexpr int kTaskRows = 64;
// Below so many multiply-adds, waking the other threads costs more than they save.
constexpr int64_t kParallelWork = 1 << 19;

// Some query tokens of one sequence and KV head, over some of the segments they see.
struct Task {
  int seq;
  int kv_head;
  int first_token;  // among the batch's tokens
  int num_tokens;
  int first_segment;
  int num_segments;
  int64_t work;
  int64_t result;  // offset of the first segment's state in the shared results; unused unless split
};

int NumSegments(int slots) { return (slots + kSegmentSlots - 1) / kSegmentSlots; }

// Slots that the token sees.
int Visible(const PagedAttentionParams& p, int seq, int token) {
  return p.context_len[seq] - (p.query_start[seq + 1] - 1 - token);
}

int64_t StateFloats(int num_rows, int head_dim) {
  const int64_t floats = static_cast<int64_t>(num_rows) * (1 + kSumLanes + PaddedHeadDim(head_dim));
  return (floats + 15) / 16 * 16;
}

// The softmax state of num_rows rows at `memory`, StateFloats long.
SoftmaxRows StateAt(float* memory, int num_rows, int head_dim) {
  SoftmaxRows rows = {};
  rows.out = memory;
  rows.sum = rows.out + static_cast<int64_t>(num_rows) * PaddedHeadDim(head_dim);
  rows.max = rows.sum + static_cast<int64_t>(num_rows) * kSumLanes;
  rows.num_rows = num_rows;
  rows.head_dim = head_dim;
  return rows;
}

// What one thread works in. Kept between calls: a layer's attention is too short to allocate for.
class Workspace {
 public:
  void Resize(const PagedAttentionParams& p, int max_rows) {
    tile_.keys = Reserve(int64_t{p.head_dim} * kTileSlots, &keys_);
    tile_.values = Reserve(int64_t{PaddedHeadDim(p.head_dim)} * kTileSlots, &values_);
    queries_ = Reserve(int64_t{p.head_dim} * max_rows, &query_lines_);
    states_ = Reserve(2 * StateFloats(max_rows, p.head_dim), &state_lines_);
    visible_.resize(static_cast<size_t>(max_rows));
  }

  // Runs the task. Its segments' states go to `results` one after the other if that is not null;
  // else they are merged and the task's rows of p.out written.
  void Run(const PagedAttentionParams& p, const Task& task, float* results) {
    const int group = p.q_heads / p.kv_heads;
    const int num_rows = task.num_tokens * group;
    LoadQueries(p, task, group);
    const int64_t state_floats = StateFloats(num_rows, p.head_dim);
    const SoftmaxRows total = StateAt(states_, num_rows, p.head_dim);
    for (int s = 0; s < task.num_segments; ++s) {
      float* memory = results != nullptr ? results + s * state_floats
                      : s == 0           ? states_
                                         : states_ + state_floats;
      SoftmaxRows rows = StateAt(memory, num_rows, p.head_dim);
      rows.q = queries_;
      rows.visible = visible_.data();
      AddSegment(p, task, task.first_segment + s, rows);
      if (results == nullptr && s > 0) MergeRows(rows, total);
    }
    if (results == nullptr) WriteRows(p, task, total);
  }

  static void WriteRows(const PagedAttentionParams& p, const Task& task, const SoftmaxRows& rows) {
    const int group = p.q_heads / p.kv_heads;
    char* out = static_cast<char*>(p.out);
    for (int r = 0; r < rows.num_rows; ++r) {
      const int64_t token = task.first_token + r / group;
      const int64_t head = token * p.q_heads + int64_t{task.kv_head} * group + r % group;
      FinishRow(rows, r, p.dtype,
                out + static_cast<size_t>(head * p.head_dim) * DTypeSize(p.dtype));
    }
  }

 private:
  void LoadQueries(const PagedAttentionParams& p, const Task& task, int group) {
    const char* q = static_cast<const char*>(p.q);
    for (int r = 0; r < task.num_tokens * group; ++r) {
      const int token = task.first_token + r / group;
      const int64_t offset =
          token * p.q_stride + static_cast<int64_t>(task.kv_head * group + r % group) * p.head_dim;
      ScaleRow(q + static_cast<size_t>(offset) * DTypeSize(p.dtype), p.dtype, p.head_dim, p.scale,
               queries_ + static_cast<int64_t>(r) * p.head_dim);
      visible_[static_cast<size_t>(r)] = Visible(p, task.seq, token);
    }
  }

  void AddSegment(const PagedAttentionParams& p, const Task& task, int segment,
                  const SoftmaxRows& rows) {
    ResetRows(rows);
    const int last_visible = rows.visible[rows.num_rows - 1];
    const int end = std::min((segment + 1) * kSegmentSlots, last_visible);
    const int32_t* table = p.block_tables + static_cast<int64_t>(task.seq) * p.max_blocks;
    const size_t head_bytes = static_cast<size_t>(p.head_dim) * DTypeSize(p.dtype);
    const size_t slot_bytes = static_cast<size_t>(p.kv_heads) * head_bytes;
    const size_t offset = static_cast<size_t>(task.kv_head) * head_bytes;
    const void* key_rows[kTileSlots];
    const void* value_rows[kTileSlots];
    for (int first = segment * kSegmentSlots; first < end; first += kTileSlots) {
      const int num_slots = std::min(kTileSlots, end - first);
      for (int j = 0; j < num_slots; ++j) {
        const int slot = first + j;
        const int64_t row =
            static_cast<int64_t>(table[slot / p.block_size]) * p.block_size + slot % p.block_size;
        const size_t at = static_cast<size_t>(row) * slot_bytes + offset;
        key_rows[j] = static_cast<const char*>(p.key_cache) + at;
        value_rows[j] = static_cast<const char*>(p.value_cache) + at;
      }
      PackTile(key_rows, value_rows, num_slots, p.head_dim, p.dtype, tile_);
      AddTile(tile_, first, rows);
    }
  }

  std::vector<Line> keys_, values_, query_lines_, state_lines_;
  std::vector<int32_t> visible_;
  PackedTile tile_ = {};
  float* queries_ = nullptr;
  float* states_ = nullptr;  // two: the task's, and the segment's that is merged into it
};

void CheckParams(const PagedAttentionParams& p) {
  CHECK(p.dtype != DType::kFloat16) << "activations are float32 or bfloat16";
  CHECK(p.kv_heads > 0 && p.q_heads % p.kv_heads == 0) << p.q_heads << " over " << p.kv_heads;
  CHECK(p.head_dim > 0 && p.block_size > 0) << p.head_dim << ", " << p.block_size;
  for (int s = 0; s < p.num_seqs; ++s) {
    const int num_new = p.query_start[s + 1] - p.query_start[s];
    CHECK(num_new >= 1 && p.context_len[s] >= num_new)
        << "sequence " << s << " has " << num_new << " new of " << p.context_len[s] << " slots";
    const int num_blocks = (p.context_len[s] + p.block_size - 1) / p.block_size;
    CHECK_LE(num_blocks, p.max_blocks) << "sequence " << s;
    const int32_t* table = p.block_tables + static_cast<int64_t>(s) * p.max_blocks;
    for (int b = 0; b < num_blocks; ++b) {
      CHECK(table[b] >= 0 && table[b] < p.num_blocks)
          << "sequence " << s << " has block " << table[b] << " of " << p.num_blocks;
    }
  }
}

std::vector<Task> MakeTasks(const PagedAttentionParams& p) {
  const int group = p.q_heads / p.kv_heads;
  const int task_tokens = std::max(1, kTaskRows / group);
  std::vector<Task> tasks;
  for (int s = 0; s < p.num_seqs; ++s) {
    for (int token = p.query_start[s]; token < p.query_start[s + 1]; token += task_tokens) {
      const int num_tokens = std::min(task_tokens, p.query_start[s + 1] - token);
      const int slots = Visible(p, s, token + num_tokens - 1);
      const int64_t work = static_cast<int64_t>(slots) * num_tokens * group * p.head_dim;
      for (int h = 0; h < p.kv_heads; ++h) {
        tasks.push_back({s, h, token, num_tokens, 0, NumSegments(slots), work, 0});
      }
    }
  }
  return tasks;
}

}  // namespace

void PagedAttention(const PagedAttentionParams& p) {
  CheckParams(p);
  std::vector<Task> tasks = MakeTasks(p);
  const auto max_threads = static_cast<size_t>(omp_get_max_threads());
  int64_t work = 0;
  int max_segments = 0;
  int max_tokens = 1;
  for (const Task& task : tasks) {
    work += task.work;
    max_segments = std::max(max_segments, task.num_segments);
    max_tokens = std::max(max_tokens, task.num_tokens);
  }
  const bool parallel = max_threads > 1 && work > kParallelWork;
  // With too few tasks for the threads, every segment becomes one; the states are merged
  // afterwards.
  const bool split = parallel && max_segments > 1 && tasks.size() < 2 * max_threads;
  const int group = p.q_heads / p.kv_heads;
  std::vector<Task> units;
  std::vector<Line> result_lines;
  float* results = nullptr;
  if (split) {
    int64_t result_floats = 0;
    for (Task& task : tasks) {
      task.result = result_floats;
      const int64_t state_floats = StateFloats(task.num_tokens * group, p.head_dim);
      for (int s = 0; s < task.num_segments; ++s) {
        Task unit = task;
        unit.first_segment = s;
        unit.num_segments = 1;
        unit.result = result_floats;
        units.push_back(unit);
        result_floats += state_floats;
      }
    }
    results = Reserve(result_floats, &result_lines);
  } else {
    units = tasks;
    // The longest first, so that no thread is left with one at the end.
    std::stable_sort(units.begin(), units.end(),
                     [](const Task& a, const Task& b) { return a.work > b.work; });
  }
#pragma omp parallel if (parallel)
  {
    static thread_local Workspace workspace;
    workspace.Resize(p, max_tokens * group);
#pragma omp for schedule(dynamic, 1)
    for (size_t i = 0; i < units.size(); ++i) {
      workspace.Run(p, units[i], split ? results + units[i].result : nullptr);
    }
  }
  if (!split) return;
#pragma omp parallel for schedule(dynamic, 1)
  for (size_t i = 0; i < tasks.size(); ++i) {
    const int num_rows = tasks[i].num_tokens * group;
    float* first = results + tasks[i].result;
    const SoftmaxRows total = StateAt(first, num_rows, p.head_dim);
    for (int s = 1; s < tasks[i].num_segments; ++s) {
      float* state = first + s * StateFloats(num_rows, p.head_dim);
      MergeRows(StateAt(state, num_rows, p.head_dim), total);
    }
    Workspace::WriteRows(p, tasks[i], total);
  }
}

}  // namespace zipage::cpu
