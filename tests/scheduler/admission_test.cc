#include "scheduler/admission.h"

#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <random>

namespace zipage {
namespace {

class AdmissionTest : public ::testing::Test {
 protected:
  Sequence* Add(uint64_t job_id) {
    SamplingParams sampling;
    requests_.push_back(std::make_unique<Request>(requests_.size(), job_id,
                                                  std::vector<TokenId>{1, 2}, sampling, 1));
    Sequence* sequence = &requests_.back()->sequences[0];
    sequence->arrival = requests_.size();
    admission_.Enqueue(sequence);
    return sequence;
  }
  Sequence* AdmitNext() {
    Sequence* sequence = admission_.Next();
    admission_.Admit(sequence);
    sequence->state = SequenceState::kPrefilling;
    running_.push_back(sequence);
    admission_.CheckInvariants(running_);
    return sequence;
  }
  void Leave(Sequence* sequence) {
    std::erase(running_, sequence);
    admission_.Leave(*sequence);
    admission_.CheckInvariants(running_);
  }

  Admission admission_;
  std::vector<std::unique_ptr<Request>> requests_;
  std::vector<Sequence*> running_;
};

TEST_F(AdmissionTest, IsFirstComeFirstServedWithinAJob) {
  Sequence* a = Add(1);
  Sequence* b = Add(1);
  EXPECT_EQ(AdmitNext(), a);
  EXPECT_EQ(AdmitNext(), b);
  EXPECT_EQ(admission_.Next(), nullptr);
  EXPECT_EQ(admission_.num_waiting(), 0);
}

TEST_F(AdmissionTest, TheJobWithTheFewestRunningIsNext) {
  std::map<uint64_t, int> running;
  for (int i = 0; i < 100; ++i) Add(1);
  for (int i = 0; i < 10; ++i) Add(2);
  for (int i = 0; i < 10; ++i) Add(3);
  for (int i = 0; i < 30; ++i) ++running[AdmitNext()->request->job_id];
  EXPECT_EQ(running[1], 10);
  EXPECT_EQ(running[2], 10);
  EXPECT_EQ(running[3], 10);
  for (int i = 0; i < 5; ++i) EXPECT_EQ(AdmitNext()->request->job_id, 1U);
}

TEST_F(AdmissionTest, AmongEqualJobsTheLeastRecentlyServedIsNext) {
  for (int i = 0; i < 9; ++i) Add(1 + i % 3);
  std::vector<uint64_t> order;
  for (int i = 0; i < 6; ++i) {
    Sequence* sequence = AdmitNext();
    order.push_back(sequence->request->job_id);
    Leave(sequence);  // So that all have equally many running.
  }
  EXPECT_EQ(order, (std::vector<uint64_t>{1, 2, 3, 1, 2, 3}));
}

TEST_F(AdmissionTest, PreemptedSequencesComeBackInTheirOrderBeforeNewOnes) {
  Sequence* a = Add(1);
  Sequence* b = Add(1);
  Sequence* c = Add(1);
  AdmitNext();
  AdmitNext();
  for (Sequence* victim : {b, a}) {
    EXPECT_EQ(Admission::Victim(running_), victim) << "the newest";
    victim->state = SequenceState::kWaiting;
    admission_.Enqueue(victim);
    Leave(victim);
  }
  EXPECT_EQ(AdmitNext(), a);
  EXPECT_EQ(AdmitNext(), b);
  EXPECT_EQ(AdmitNext(), c);
}

TEST_F(AdmissionTest, LeavesAReserveUnlessNothingRuns) {
  Sequence* sequence = Add(1);
  EXPECT_TRUE(admission_.Fits(*sequence, 1000, 1000, 1000, 0));
  EXPECT_FALSE(admission_.Fits(*sequence, 1001, 1000, 1000, 0));
  EXPECT_FALSE(admission_.Fits(*sequence, 1000, 1000, 1000, 1));
  EXPECT_TRUE(admission_.Fits(*sequence, 990, 1000, 1000, 100));
  EXPECT_FALSE(admission_.Fits(*sequence, 991, 1000, 1000, 100));
  EXPECT_FALSE(admission_.Fits(*sequence, 10, 10, 10, 1)) << "one block at least";
  sequence->num_preemptions = 1;
  EXPECT_FALSE(admission_.Fits(*sequence, 990, 1000, 1000, 100)) << "a block for each that runs";
  EXPECT_TRUE(admission_.Fits(*sequence, 900, 1000, 1000, 100));
  EXPECT_TRUE(admission_.Fits(*sequence, 1000, 1000, 1000, 0));
}

TEST_F(AdmissionTest, CountsTheWaitingSequencesOfEachJob) {
  Add(1);
  Add(1);
  Add(2);
  EXPECT_EQ(admission_.num_waiting(1), 2);
  Leave(AdmitNext());
  EXPECT_EQ(admission_.num_waiting(1), 1);
  EXPECT_EQ(admission_.num_waiting(2), 1);
  EXPECT_EQ(admission_.num_waiting(3), 0);
}

TEST_F(AdmissionTest, RemovesAWaitingSequence) {
  Sequence* a = Add(1);
  Sequence* b = Add(1);
  admission_.Remove(a);
  EXPECT_EQ(admission_.num_waiting(), 1);
  EXPECT_EQ(admission_.Next(), b);
  admission_.Remove(b);
  EXPECT_EQ(admission_.Next(), nullptr);
  EXPECT_DEATH(admission_.Remove(b), "request 1");
}

TEST_F(AdmissionTest, NobodyStarvesWhileJobsComeAndGo) {
  std::mt19937 rng(5);
  std::map<Sequence*, int> waited;
  size_t num_served = 0;
  for (int op = 0; op < 5000; ++op) {
    if (op < 2500 && rng() % 2 == 0) {
      waited[Add(rng() % 4)] = op;
    } else if (rng() % 2 == 0 && !running_.empty()) {
      Leave(running_[rng() % running_.size()]);
    } else if (admission_.Next() != nullptr) {
      waited.erase(AdmitNext());
      ++num_served;
    }
  }
  EXPECT_EQ(num_served, requests_.size());
  EXPECT_TRUE(waited.empty());
}

}  // namespace
}  // namespace zipage
