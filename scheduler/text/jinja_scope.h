#pragma once
// Private to the interpreter's two files.

#include "scheduler/text/jinja_interpreter.h"

namespace zipage::jinja {

class Interpreter::ScopeGuard {
 public:
  ScopeGuard(Interpreter* interpreter, Scope* parent)
      : interpreter_(interpreter), outer_(interpreter->scope_) {
    scope_.parent = parent;
    interpreter_->scope_ = &scope_;
  }
  ~ScopeGuard() { interpreter_->scope_ = outer_; }
  ScopeGuard(const ScopeGuard&) = delete;
  ScopeGuard& operator=(const ScopeGuard&) = delete;

 private:
  Interpreter* interpreter_;
  Scope* outer_;
  Scope scope_;
};

}  // namespace zipage::jinja
