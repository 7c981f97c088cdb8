#include "proto/wire.h"

#include <capnp/message.h>
#include <capnp/serialize.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>

#include "proto/zipage.capnp.h"
#include "tests/proto/random_messages.h"

namespace zipage::wire {
namespace {

using ::testing::HasSubstr;

// Bytes of a message built by hand, for what Encode cannot say.
template <typename Root>
std::string Build(const std::function<void(typename Root::Builder)>& fill) {
  capnp::MallocMessageBuilder builder(1 << 16);  // One segment, so that tests can find their way.
  fill(builder.initRoot<Root>());
  const auto words = capnp::messageToFlatArray(builder);
  const auto bytes = words.asBytes();
  return {reinterpret_cast<const char*>(bytes.begin()), bytes.size()};
}

template <typename T>
void ExpectRefused(const absl::StatusOr<T>& decoded, const std::string& text) {
  ASSERT_FALSE(decoded.ok()) << text;
  EXPECT_EQ(decoded.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(decoded.status().message()), HasSubstr(text));
  EXPECT_EQ(decoded.status().message().find('\n'), std::string::npos);
}

TEST(WireTest, BringsEveryRandomMessageBackUnchanged) {
  RandomMessages random(/*seed=*/1);
  for (int i = 0; i < FuzzIterations(5000); ++i) {
    const WorkerMessage worker = random.Worker();
    const auto worker_back = DecodeWorkerMessage(Encode(worker));
    ASSERT_TRUE(worker_back.ok()) << worker_back.status();
    ASSERT_TRUE(*worker_back == worker) << "message " << i << ", kind " << worker.index();

    const SchedulerMessage scheduler = random.Scheduler();
    const auto scheduler_back = DecodeSchedulerMessage(Encode(scheduler));
    ASSERT_TRUE(scheduler_back.ok()) << scheduler_back.status();
    ASSERT_TRUE(*scheduler_back == scheduler) << "message " << i << ", kind " << scheduler.index();

    const ClientMessage client = random.Client();
    const auto client_back = DecodeClientMessage(Encode(client));
    ASSERT_TRUE(client_back.ok()) << client_back.status();
    ASSERT_TRUE(*client_back == client) << "message " << i << ", kind " << client.index();

    const ClientReply reply = random.Reply();
    const auto reply_back = DecodeClientReply(Encode(reply));
    ASSERT_TRUE(reply_back.ok()) << reply_back.status();
    ASSERT_TRUE(*reply_back == reply) << "message " << i << ", kind " << reply.index();
  }
}

TEST(WireTest, BringsDefaultMessagesBackUnchanged) {
  EXPECT_TRUE(*DecodeWorkerMessage(Encode(WorkerMessage(StepResult{}))) ==
              WorkerMessage(StepResult{}));
  EXPECT_TRUE(*DecodeSchedulerMessage(Encode(SchedulerMessage(StepPlan{}))) ==
              SchedulerMessage(StepPlan{}));
  EXPECT_TRUE(*DecodeClientReply(Encode(ClientReply(EngineStatus{}))) ==
              ClientReply(EngineStatus{}));
}

TEST(WireTest, ReadsBytesAtEveryAlignment) {
  RandomMessages random(/*seed=*/2);
  const SchedulerMessage plan = random.Plan();
  const std::string bytes = Encode(plan);
  for (size_t shift = 0; shift < 16; ++shift) {
    std::string shifted(shift, 'x');
    shifted += bytes;
    const auto back = DecodeSchedulerMessage(std::string_view(shifted).substr(shift));
    ASSERT_TRUE(back.ok()) << back.status();
    EXPECT_TRUE(*back == plan) << "shift " << shift;
  }
}

// A steady decode step sends no more for 4096 sequences than for one. Every 256th position opens a
// block, so a step of 4096 sequences appends 16 on average.
TEST(WireTest, SendsASteadyDecodeStepInAFewHundredBytes) {
  for (const uint32_t num_sequences : {1U, 256U, 4096U}) {
    StepPlan plan;
    plan.step = 123456;
    plan.num_decoding = num_sequences;
    for (uint32_t i = 0; i < num_sequences / 256; ++i) {
      plan.appended_blocks.push_back({static_cast<int>(i * 7), static_cast<int>(i * 1000)});
    }
    EXPECT_LT(Encode(SchedulerMessage(plan)).size(), 400U) << num_sequences << " sequences";
  }
}

TEST(WireTest, SendsBlockTablesFlat) {
  StepPlan plan;
  plan.step = 9;
  for (int sequence = 0; sequence < 512; ++sequence) {
    for (int block = 0; block < 10; ++block) {
      plan.appended_blocks.push_back({sequence, sequence * 10 + block});
    }
  }
  const std::string bytes = Encode(SchedulerMessage(plan));
  EXPECT_LT(bytes.size(), 512U * 10 * 8 + 400);
  const auto back = DecodeSchedulerMessage(bytes);
  ASSERT_TRUE(back.ok()) << back.status();
  EXPECT_TRUE(std::get<StepPlan>(*back) == plan);
}

TEST(WireTest, RefusesLengthsThatAreNoMessage) {
  const std::string bytes = Encode(SchedulerMessage(Start{.num_kv_blocks = 7}));
  ExpectRefused(DecodeSchedulerMessage(""), "SchedulerMessage of 0 bytes");
  ExpectRefused(DecodeSchedulerMessage(bytes + "x"), "multiple of 8");
  ExpectRefused(DecodeSchedulerMessage(bytes + std::string(16, '\0')),
                "followed by 16 other bytes");
  for (size_t n = 0; n < bytes.size(); ++n) {
    EXPECT_FALSE(DecodeSchedulerMessage(bytes.substr(0, n)).ok()) << n << " bytes";
  }
}

TEST(WireTest, RefusesParallelListsOfDifferentLength) {
  const auto plan = [](const std::function<void(schema::StepPlan::Builder)>& fill) {
    return DecodeSchedulerMessage(
        Build<schema::SchedulerMessage>([&](auto root) { fill(root.initPlan()); }));
  };
  ExpectRefused(plan([](auto p) { p.initBlockIds(3); }), "StepPlan.blockIds has 3 entries");
  ExpectRefused(plan([](auto p) { p.initBlockSlots(1); }), "StepPlan.blockIds has 0 entries");
  ExpectRefused(plan([](auto p) { p.initChunkSlots(2); }), "StepPlan.chunkStarts has 0 entries");
  ExpectRefused(plan([](auto p) {
                  p.initChunkSlots(2);
                  p.initChunkStarts(2);
                  p.initChunkTokens(1);
                }),
                "StepPlan.chunkTokens has 1 entries, chunkSlots has 2");
  ExpectRefused(plan([](auto p) {
                  p.initChunkSlots(2);
                  p.initChunkStarts(2);
                  p.initChunkTokens(2);
                  p.initChunkSamples(65);
                }),
                "StepPlan.chunkSamples has 65 entries");
  ExpectRefused(plan([](auto p) { p.initQuerySlotOwners(2); }),
                "StepPlan.querySlots has 0 entries, querySlotOwners has 2");
}

TEST(WireTest, RefusesLogprobRowsThatDoNotFitTheirTokens) {
  struct Rows {
    std::vector<int> slots, offsets;
    unsigned num_tokens, num_values;
    std::string error;  // Empty: accepted.
  };
  const Rows table[] = {
      {{5}, {0, 2}, 2, 2, ""},
      {{5, 7}, {0, 1, 3}, 3, 3, ""},
      {{}, {0}, 0, 0, "logprobOffsets has 1 entries; 0 rows need 0"},
      {{5}, {0}, 2, 2, "logprobOffsets has 1 entries; 1 rows need 2"},
      {{5}, {0, 2}, 2, 1, "logprobValues has 1 entries, logprobTokens has 2"},
      {{5}, {1, 2}, 2, 2, "covers entries 1 to 2 of 2"},
      {{5}, {0, 3}, 2, 2, "covers entries 0 to 3 of 2"},
      {{5, 6}, {0, 2, 2}, 2, 2, "row 1 is [2, 2)"},
      {{5, 6}, {0, 9, 2}, 2, 2, "row 0 is [0, 9)"},
      {{7, 5}, {0, 1, 2}, 2, 2, "slot 5, which has no token there"},
      {{8}, {0, 1}, 1, 1, "slot 8, which has no token there"},
      {{}, {}, 1, 1, "covers entries 0 to 0 of 1"},
  };
  for (const Rows& rows : table) {
    const std::string bytes = Build<schema::WorkerMessage>([&](auto root) {
      auto result = root.initResult();
      auto slots = result.initSequenceSlots(3);
      result.initTokens(3);
      for (unsigned i = 0; i < 3; ++i) slots.set(i, static_cast<int>(5 + i));
      auto row_slots = result.initLogprobSlots(static_cast<unsigned>(rows.slots.size()));
      for (unsigned i = 0; i < row_slots.size(); ++i) row_slots.set(i, rows.slots[i]);
      auto offsets = result.initLogprobOffsets(static_cast<unsigned>(rows.offsets.size()));
      for (unsigned i = 0; i < offsets.size(); ++i) {
        offsets.set(i, static_cast<uint32_t>(rows.offsets[i]));
      }
      result.initLogprobTokens(rows.num_tokens);
      result.initLogprobValues(rows.num_values);
    });
    const auto decoded = DecodeWorkerMessage(bytes);
    if (rows.error.empty()) {
      EXPECT_TRUE(decoded.ok()) << decoded.status();
    } else {
      ExpectRefused(decoded, rows.error);
    }
  }
}

TEST(WireTest, RefusesNumbersThatAreNotFinite) {
  for (const float bad : {NAN, INFINITY, -INFINITY}) {
    for (float SamplingParams::*field :
         {&SamplingParams::temperature, &SamplingParams::top_p, &SamplingParams::min_p,
          &SamplingParams::repetition_penalty, &SamplingParams::presence_penalty,
          &SamplingParams::frequency_penalty}) {
      StepPlan plan;
      plan.new_sequences.emplace_back().sampling.*field = bad;
      ExpectRefused(DecodeSchedulerMessage(Encode(SchedulerMessage(plan))), "not a finite number");
    }
    EngineStatus status;
    status.uptime = bad;
    ExpectRefused(DecodeClientReply(Encode(ClientReply(status))), "EngineStatus.uptime");
  }
  StepResult result;
  result.sampled = {{1, 2, {{2, NAN}}}};
  ExpectRefused(DecodeWorkerMessage(Encode(WorkerMessage(result))), "logprobValues entry 0");
}

TEST(WireTest, RefusesEnumsAndKindsItDoesNotKnow) {
  ExpectRefused(
      DecodeWorkerMessage(Encode(WorkerMessage(Heartbeat{.phase = static_cast<WorkerPhase>(5)}))),
      "Heartbeat.phase is 5");
  EngineStatus status;
  status.jobs.emplace_back().state = static_cast<JobState>(65535);
  ExpectRefused(DecodeClientReply(Encode(ClientReply(status))), "JobStatus.state is 65535");
  ExpectRefused(DecodeWorkerMessage(Encode(WorkerMessage(WorkerError{.code = 17, .message = ""}))),
                "WorkerError.code is 17");
  // Kind 4 of a worker is no kind of a scheduler.
  ExpectRefused(DecodeSchedulerMessage(Encode(WorkerMessage(WorkerError{}))), "does not know");
}

// Two thousand pointers to one list: half a million tokens out of 24 KB if nothing bounded it.
TEST(WireTest, RefusesAMessageThatUnfoldsIntoALargerOne) {
  std::string bytes = Build<schema::SchedulerMessage>([](auto root) {
    auto compressions = root.initPlan().initCompressions(2000);
    compressions[1999].initSourceTable(250);
  });
  // The last element's pointer, with its offset corrected, copied into all others.
  const auto word = [&bytes](size_t i) { return reinterpret_cast<uint64_t*>(bytes.data())[i]; };
  const size_t num_words = bytes.size() / 8;
  const size_t list_begin = num_words - 125;
  const size_t last = list_begin - 2;  // Elements: one word of data, two pointers.
  ASSERT_EQ(word(last) & 3, 1U) << "a list pointer";
  for (size_t i = 1; i < 2000; ++i) {
    const uint64_t moved = word(last) + (uint64_t{3 * i} << 2);
    reinterpret_cast<uint64_t*>(bytes.data())[last - 3 * i] = moved;
  }
  ExpectRefused(DecodeSchedulerMessage(bytes), "Compression.sourceTable cannot be read");
}

TEST(WireTest, SurvivesHostileBytes) {
  RandomMessages random(/*seed=*/3);
  int64_t accepted = 0;
  for (int i = 0; i < FuzzIterations(100'000); ++i) {
    std::string bytes;
    switch (i % 4) {
      case 0:
        bytes = random.Mutated(Encode(random.Worker()));
        accepted += DecodeWorkerMessage(bytes).ok();
        break;
      case 1:
        bytes = random.Mutated(Encode(random.Scheduler()));
        accepted += DecodeSchedulerMessage(bytes).ok();
        break;
      case 2:
        bytes = random.Mutated(Encode(random.Client()));
        accepted += DecodeClientMessage(bytes).ok();
        break;
      default:
        bytes = random.Mutated(Encode(random.Reply()));
        accepted += DecodeClientReply(bytes).ok();
        break;
    }
    // And as a message of every other kind.
    if (const auto decoded = DecodeWorkerMessage(bytes); decoded.ok()) {
      ASSERT_TRUE(DecodeWorkerMessage(Encode(*decoded)).ok());
    }
    if (const auto decoded = DecodeSchedulerMessage(bytes); decoded.ok()) {
      ASSERT_TRUE(*DecodeSchedulerMessage(Encode(*decoded)) == *decoded);
    }
    if (const auto decoded = DecodeClientReply(bytes); decoded.ok()) {
      ASSERT_TRUE(*DecodeClientReply(Encode(*decoded)) == *decoded);
    }
  }
  EXPECT_GT(accepted, 0) << "mutations so heavy that nothing behind the first check is reached";
}

}  // namespace
}  // namespace zipage::wire
